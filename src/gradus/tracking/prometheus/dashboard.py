"""A dashboard of the run for Grafana, made from the names of the catalogue.

Each query asks for metrics by our names; the rule of `names.py` says what Prometheus calls them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradus.tracking.prometheus.names import export

TITLE = "gradus run"
UID = "gradus-run"
_METRIC = re.compile(r"\[([a-z][^\[\]]*)\]")
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24
"""Columns of a dashboard in Grafana."""
_HEIGHT = 8


@dataclass(frozen=True)
class Query:
    """PromQL, with metrics of ours in square brackets: `rate([live/episodes/<source>/...])`."""

    text: str
    legend: str

    @property
    def expression(self) -> str:
        """What Prometheus is asked, for the run that is chosen at the top."""
        return _METRIC.sub(lambda found: select(found[1]), self.text)


def select(metric: str) -> str:
    """All series of a metric of ours, of the chosen run; other series by their own name.

    >>> select("episode/<source>/reward/mean")
    'gradus_episode_source_reward_mean{run=~"$run"}'
    """
    name = metric if metric.startswith("gradus_") else export(metric).name
    return f'{name}{{run=~"$run"}}'


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """As Grafana names it."""
    note: str = ""
    """What a person should know who looks at it."""
    is_number: bool = False
    """Shows the last value, large, in place of a curve."""


@dataclass(frozen=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _per_second(metric: str) -> str:
    return f"rate([{metric}][$__rate_interval])"


_ENDED = "live/episodes/<source>/<outcome>/total"

ROWS = (
    PanelRow(
        "Run",
        (
            Panel("Step", (Query("[gradus_step] + 1", "{{run}}"),), is_number=True),
            Panel("Reward", (Query("[episode/reward/mean]", "{{run}}"),), is_number=True),
            Panel(
                "Time of a step", (Query("[time/step_seconds]", "{{run}}"),), "s", is_number=True
            ),
            Panel(
                "Generated",
                (Query("[throughput/generated_tokens_per_second]", "{{run}}"),),
                "short",
                "Tokens per second over the last step.",
                is_number=True,
            ),
            Panel(
                "Last record",
                (Query("time() - [gradus_record_timestamp_seconds]", "{{run}}"),),
                "s",
                "How long ago.",
                is_number=True,
            ),
            Panel(
                "Alarms",
                (Query("sum([alarm/<alarm>] or [alarm/<source>/<alarm>]) or vector(0)", "on"),),
                is_number=True,
            ),
        ),
    ),
    PanelRow(
        "Reward",
        (
            Panel(
                "Reward",
                (
                    Query("[episode/reward/mean]", "mean {{run}}"),
                    Query("[episode/reward/p5]", "p5 {{run}}"),
                    Query("[episode/reward/p95]", "p95 {{run}}"),
                ),
            ),
            Panel(
                "By source",
                (
                    Query("[episode/<source>/reward/mean]", "{{source}}"),
                    Query("[episode/<source>/agent/<agent>/reward/mean]", "{{source}}: {{agent}}"),
                ),
            ),
            Panel(
                "Parts of the reward",
                (
                    Query("[episode/<source>/reward/<part>/mean]", "{{source}}: {{part}}"),
                    Query(
                        "[episode/<source>/agent/<agent>/reward/<part>/mean]",
                        "{{source}}: {{agent}}: {{part}}",
                    ),
                ),
                note="Without their weights.",
            ),
            Panel(
                "Evaluations",
                (
                    Query("[eval/<environment>/avg@<k>]", "{{environment}} avg@{{k}}"),
                    Query("[eval/<environment>/pass@<k>]", "{{environment}} pass@{{k}}"),
                ),
            ),
            Panel(
                "Length of an episode",
                (
                    Query("[episode/<source>/length_tokens/p50]", "{{source}} p50"),
                    Query("[episode/<source>/length_tokens/p95]", "{{source}} p95"),
                ),
                note="Sampled tokens.",
            ),
            Panel(
                "What the environments measure",
                (Query("[episode/<source>/metric/<name>/mean]", "{{source}}: {{name}}"),),
            ),
        ),
    ),
    PanelRow(
        "Episodes by outcome",
        (
            Panel(
                "Ended per minute",
                (
                    Query(
                        f"60 * sum by (source, outcome) ({_per_second(_ENDED)})",
                        "{{source}} {{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Shares",
                (
                    Query("[episode/error/share]", "failed"),
                    Query("[episode/truncated/share]", "truncated"),
                    Query("[episode/dropped/share]", "dropped"),
                    Query("[episode/flat/share]", "flat"),
                ),
                "percentunit",
                "Failed: of all that ended. The others: of those that ended well.",
            ),
            Panel(
                "Failures by type",
                (Query("[episode/<source>/error/<error>/share]", "{{source}}: {{error}}"),),
                "percentunit",
            ),
            Panel(
                "Dropped samples by reason",
                (Query("[sample/<source>/dropped/<reason>/share]", "{{source}}: {{reason}}"),),
                "percentunit",
            ),
        ),
    ),
    PanelRow(
        "Staleness and queues",
        (
            Panel(
                "Staleness",
                (
                    Query("[sample/staleness/mean]", "mean"),
                    Query("[sample/staleness/p95]", "p95"),
                    Query("[sample/staleness/max]", "max"),
                ),
                note="Steps between the weights that sampled and those that train.",
            ),
            Panel(
                "Groups",
                (
                    Query("[live/groups/open]", "being played"),
                    Query("[live/groups/scoring]", "being judged"),
                    Query("[live/groups/complete]", "ready for a batch"),
                    Query("[live/groups/shipped]", "in a batch"),
                    Query("[live/slots/free]", "free slots"),
                ),
                note="Always many ready: the trainer is the slow one. Always none: the episodes.",
            ),
            Panel(
                "Episodes in flight",
                (
                    Query("[live/running/<source>]", "{{source}}"),
                    Query("[live/in_flight/limit]", "limit"),
                    Query("[live/in_flight/planned]", "planned"),
                ),
            ),
            Panel(
                "On their way",
                (
                    Query("[live/batches/untrained]", "batches not trained"),
                    Query("[live/batches/unserved]", "versions not served"),
                    Query("[live/records/waiting]", "records not written"),
                ),
            ),
            Panel("Since anything moved", (Query("[live/quiet_seconds]", "{{run}}"),), "s"),
            Panel(
                "Who waits",
                (
                    Query("[time/generate_wait_seconds]", "a batch for its last episodes"),
                    Query("[time/receive_seconds]", "the trainer for a batch"),
                ),
                "s",
            ),
        ),
    ),
    PanelRow(
        "Trainer",
        (
            Panel("Loss", (Query("[loss/total/mean]", "{{run}}"),)),
            Panel(
                "Trainer against engine",
                (
                    Query("[loss/mismatch_kl/mean]", "mismatch KL, mean"),
                    Query("[loss/mismatch_kl/max]", "mismatch KL, max"),
                ),
                note="On the same tokens, in nats.",
            ),
            Panel("Largest ratio", (Query("[loss/ratio/max]", "{{run}}"),)),
            Panel("Entropy", (Query("[loss/entropy/mean]", "{{run}}"),), note="Nats per token."),
            Panel(
                "Gradient",
                (
                    Query("[optimizer/grad_norm]", "norm before clipping"),
                    Query("[optimizer/skipped/total]", "updates skipped"),
                ),
            ),
            Panel(
                "Time of a step",
                (
                    Query("[time/step_seconds]", "step"),
                    Query("[time/receive_seconds]", "receive"),
                    Query("[time/forward_backward_seconds]", "forward, backward"),
                    Query("[time/optimize_seconds]", "update"),
                    Query("[time/publish_seconds]", "publish"),
                ),
                "s",
            ),
            Panel(
                "Tokens trained per second",
                (Query("[throughput/trained_tokens_per_second]", "{{run}}"),),
            ),
            Panel(
                "Memory, the most so far",
                (Query("[throughput/peak_memory_gib]", "fullest rank"),),
                "bytes",
            ),
        ),
    ),
    PanelRow(
        "Engine",
        (
            Panel(
                "Requests",
                (
                    Query("[live/engine/running]", "running"),
                    Query("[live/engine/waiting]", "waiting"),
                ),
            ),
            Panel(
                "KV cache in use",
                (Query("[live/engine/kv_usage]", "{{run}}"),),
                "percentunit",
                "Above 0.8 the limit of episodes in flight is lowered.",
            ),
            Panel(
                "Tokens per second",
                (
                    Query(_per_second("live/engine/generated_tokens/total"), "generated"),
                    Query(_per_second("live/engine/prompt_tokens/total"), "read as prompts"),
                ),
            ),
            Panel(
                "Prompt tokens found in the cache",
                (
                    Query(
                        f"{_per_second('live/engine/prefix_hits/total')} / "
                        f"{_per_second('live/engine/prefix_queries/total')}",
                        "{{run}}",
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Preemptions per minute",
                (Query(f"60 * {_per_second('live/engine/preemptions/total')}", "{{run}}"),),
            ),
            Panel(
                "A new version",
                (
                    Query("[weights/publish_seconds]", "publish"),
                    Query("[weights/apply_seconds]", "apply"),
                    Query("[weights/pause_seconds]", "of it, the engine stands still"),
                ),
                "s",
            ),
        ),
    ),
    PanelRow(
        "Alarms",
        (
            Panel(
                "Alarms",
                (
                    Query("[alarm/<alarm>]", "{{alarm}}"),
                    Query("[alarm/<source>/<alarm>]", "{{source}}: {{alarm}}"),
                ),
                note="1 while it is on.",
            ),
            Panel(
                "What the alarms measure",
                (
                    Query("[alarm/<alarm>/value]", "{{alarm}}"),
                    Query("[alarm/<source>/<alarm>/value]", "{{source}}: {{alarm}}"),
                ),
            ),
            Panel(
                "Signs of life",
                (
                    Query("time() - [gradus_process_alive_timestamp_seconds]", "{{process}}"),
                    Query("time() - [gradus_live_timestamp_seconds]", "queues"),
                ),
                "s",
                "Seconds since the last one. Usual: 5, and 1 for the queues.",
            ),
            Panel(
                "Starved tasks",
                (Query("[episode/<source>/slow_bias]", "{{source}}"),),
                note="1 - share of slow tasks that train / share of all: 0 is fair.",
            ),
            Panel("The engine answers", (Query("[live/engine/answers]", "{{run}}"),)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """What Grafana imports: it asks for a data source and a run, nothing else is to be changed."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(_heading(row.title, top))
        panels += _placed(row.panels, top + 1)
        lines = -(-len(row.panels) // _per_line(row.panels))
        top += 1 + lines * _height(row.panels)
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "title": TITLE,
        "uid": UID,
        "tags": ["gradus"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource_choice(), _run_choice()]},
        "panels": panels,
    }


def _per_line(panels: Sequence[Panel]) -> int:
    return 6 if panels[0].is_number else 3


def _height(panels: Sequence[Panel]) -> int:
    return _HEIGHT // 2 if panels[0].is_number else _HEIGHT


def _placed(panels: Sequence[Panel], top: int) -> list[dict[str, Any]]:
    """Side by side, in lines."""
    columns, height = _per_line(panels), _height(panels)
    width = _WIDTH // columns
    return [
        _panel(panel)
        | {
            "gridPos": {
                "x": index % columns * width,
                "y": top + index // columns * height,
                "w": width,
                "h": height,
            }
        }
        for index, panel in enumerate(panels)
    ]


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "instant": panel.is_number,
            "range": not panel.is_number,
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.note,
        "datasource": _DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {} if panel.is_number else {"legend": {"showLegend": True}},
    }


def _heading(title: str, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}


def _datasource_choice() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "label": "Prometheus",
        "query": "prometheus",
    }


def _run_choice() -> dict[str, Any]:
    return {
        "name": "run",
        "type": "query",
        "label": "Run",
        "datasource": _DATASOURCE,
        "query": {"query": "label_values(gradus_run_info, run)", "refId": "run"},
        "refresh": 2,
        "multi": False,
        "includeAll": False,
        "sort": 1,
    }

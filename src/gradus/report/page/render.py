"""One page about one run: a head, then what a colleague asks, in the order in which they ask it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import gradus
from gradus.monitor import LAST_STEPS, first_and_last, verdict_on
from gradus.report.choice import unit_of
from gradus.report.episodes import EpisodesRead, choose_episodes
from gradus.report.folder import RunFolder, notices, read_folder, when
from gradus.report.page.charts import draw, sparkline
from gradus.report.page.curves import charts
from gradus.report.page.sections import (
    alarm_section,
    episode_section,
    failure_section,
    result_section,
    settings_section,
    time_section,
)
from gradus.report.page.style import STYLE, colours
from gradus.report.series import Axis, RunSeries, read_series
from gradus.report.text import duration, escape, number
from gradus.run.paths import GOOD_OUTCOMES

_KINDS = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "eval": "Evaluation",
    "replay": "Replay of a recorded run",
    "bench": "Benchmark of the trainer",
}
_ENDS = {"killed": "ended without a word", "running": "still running"}
_MAX_NAMES_IN_TABLE = 400
_AGENT_REWARD = r"episode/[^/]+/agent/[^/]+/reward/mean"
_MAX_AGENTS = 4
"""Tiles of rewards where each agent has its own."""


@dataclass(frozen=True)
class Read:
    """Everything of one run that a page shows."""

    folder: RunFolder
    series: RunSeries
    episodes: EpisodesRead
    notices: Sequence[str]


def read_run(root: Path) -> Read:
    """Read a run's folder; ConfigError when it is none."""
    folder = read_folder(root)
    return Read(
        folder,
        read_series(folder.run_dir.metrics),
        choose_episodes(folder.run_dir),
        notices(folder.run_dir),
    )


def render(run: Read, *, over: Axis = "steps") -> str:
    """The page, with everything that it needs inside it.

    >>> render(read_run(Path("runs/demo")))[:15]  # doctest: +SKIP
    '<!doctype html>'
    """
    style = STYLE + colours()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # No script, no picture, no font and no address can be loaded, whatever a text smuggles in.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = [
        ("results", "Results", result_section(run.folder)),
        ("curves", "Curves", _curves(run.series, over)),
        ("settings", "Settings", settings_section(run.folder)),
        ("episodes", "Episodes", episode_section(run.episodes)),
        ("alarms", "Alarms and notices", alarm_section(run.series, run.notices)),
        ("time", "Where the time went", time_section(run.folder, run.series)),
        ("failures", "Failures and drops", failure_section(run.folder, run.series, run.episodes)),
        ("metrics", "All metrics", _all_metrics(run.series, over)),
    ]
    shown = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in shown)
    body = "".join(
        f'<section id="{anchor}"><h2>{title}</h2>{content}</section>'
        for anchor, title, content in shown
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(run.folder.name)}: report</title><style>{style}</style></head>"
        f"<body><header>{_head(run)}<nav>{links}</nav></header><main>{body}{_foot()}</main>"
        "</body></html>\n"
    )


def _head(run: Read) -> str:
    folder, series = run.folder, run.series
    kind = _KINDS.get(folder.kind, "Run")
    model = folder.settings.values.get("model.name")
    began = next((p.time for p in (*series.steps, *series.evaluations)), None)
    words = [
        kind,
        f"of {escape(model)}" if model else "",
        f"first record {when(began)}" if began else "no records",
    ]
    versions = " · ".join(f"{escape(k)} {escape(v)}" for k, v in folder.versions.items())
    end = _ENDS.get(folder.outcome, folder.outcome)
    cause = ""
    if folder.cause:
        soft = " soft" if folder.outcome in {"interrupted", *GOOD_OUTCOMES} else ""
        cause = f'<p class="cause{soft}">{escape(folder.cause, limit=2_000)}</p>'
    return (
        f'<h1>{escape(folder.name)}<span class="badge {_css_word(folder.outcome)}">{escape(end)}'
        f'</span></h1><p class="sub">{" · ".join(w for w in words if w)}</p>'
        f'<p class="sub note">{versions}</p>{cause}{_verdict(run)}'
        f'<div class="tiles">{_tiles(run)}</div>'
    )


def _verdict(run: Read) -> str:
    verdict = verdict_on(run.folder.kind, run.folder.outcome, run.series.steps)
    if verdict is None:
        return ""
    advice = f" Next: {verdict.advice}." if verdict.advice else ""
    return f'<p class="sub">{escape(f"Verdict: {verdict}.{advice}", limit=1_000)}</p>'


def _css_word(outcome: str) -> str:
    known = ("failed", "interrupted", "running", "killed")
    outcome = "interrupted" if outcome == "alarmed" else outcome
    return "done" if outcome in GOOD_OUTCOMES else outcome if outcome in known else "killed"


def _tiles(run: Read) -> str:
    folder, series = run.folder, run.series
    done = len({point.step for point in series.steps})
    last_step = max((point.step + 1 for point in series.steps), default=0)
    planned = folder.summary.get("max_steps") or folder.settings.values.get("max_steps")
    tiles = []
    if series.steps or folder.kind in ("rl", "sft"):
        steps = number(float(last_step if series.is_sampled else done))
        of_all = f" of {number(float(planned))}" if type(planned) is int else ""
        tiles.append((f"{steps}{of_all}", "steps"))
    tiles += _first_and_last(run)
    seconds = folder.summary.get("seconds")
    total = seconds.get("total") if isinstance(seconds, dict) else None
    times = [p.time for p in (*series.steps, *series.evaluations)]
    if isinstance(total, int | float) and folder.num_launches == 1:
        tiles.append((duration(float(total)), "from start to end"))
    elif len(times) > 1:
        tiles.append((duration(max(times) - min(times)), "from the first record to the last"))
    if folder.num_launches > 1:
        tiles.append((str(folder.num_launches), "launches (resumed)"))
    tokens = series.positions("batch/tokens/sum", "tokens")
    if tokens:
        about = "about, " if series.is_sampled else ""
        tiles.append(
            (number(tokens[-1][0]), f"tokens trained{f' ({about}from a sample)' if about else ''}")
        )
    speeds = [v for _, v in series.values("throughput/trained_tokens_per_second")]
    if speeds:
        tiles.append((number(round(median(speeds))), "tokens/s trained, median"))
    return "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    )


def _first_and_last(run: Read) -> list[tuple[str, str]]:
    """The reward of an RL run, by agent where only agents have one; the loss of another run."""
    series = run.series
    named = {"episode/reward/mean": "reward"}
    if named.keys().isdisjoint(series.names):
        agents = (n for n in series.names if re.fullmatch(_AGENT_REWARD, n, re.DOTALL))
        named = {name: f"reward of {name.split('/')[-3]}" for name in islice(agents, _MAX_AGENTS)}
    if run.folder.kind != "rl":
        named["loss/total/mean"] = "loss"
    tiles = []
    for name, title in named.items():
        if ends := first_and_last([value for _, value in series.values(name)]):
            told = f"{title}, first step and mean of the last {LAST_STEPS}"
            tiles.append((f"{number(ends[0])} → {number(ends[1])}", told))
    return tiles


def _curves(series: RunSeries, over: Axis) -> str:
    if not series.steps and not series.evaluations:
        return (
            '<p class="lead">The run has no records: no step and no evaluation came to its end.</p>'
        )
    words = "Thin: each record. Bold: the mean of a record and its neighbours, an eighth of all."
    if len(series.steps) < 12:
        words = "A dot for each record."
    if series.is_sampled:
        words += (
            " The file of metrics is long: an even sample of its records is drawn, and its end."
        )
    found = series.non_finite()
    lost = ""
    if found:
        listed = "; ".join(
            f"{name} (step {', '.join(map(str, steps[:5]))}{' …' if len(steps) > 5 else ''})"
            for name, steps in list(found.items())[:20]
        )
        said = f"Not finite, so missing in the curves: {listed}"
        lost = f'<p class="cause">{escape(said, limit=1500)}</p>'
    if series.broken.count:
        lost += f'<p class="cause">{escape(f"metrics.jsonl has {series.broken}.")}</p>'
    drawn = "".join(draw(chart) for chart in charts(series, over)[:28])
    return f'<p class="lead">{words}</p>{lost}<div class="charts">{drawn}</div>'


def _all_metrics(series: RunSeries, over: Axis) -> str:
    if not series.names:
        return ""
    rows = []
    for name in sorted(series.names)[:_MAX_NAMES_IN_TABLE]:
        points = series.positions(name, over)
        if not points:
            continue
        values = [y for _, y in points]
        cells = "".join(
            f'<td class="n">{number(v)}</td>'
            for v in (values[0], values[-1], min(values), max(values))
        )
        rows.append(
            f'<tr><td class="w"><code>{escape(name, limit=160)}</code></td>'
            f"<td>{escape(unit_of(name))}</td>{cells}<td>{sparkline(points)}</td></tr>"
        )
    left_out = max(0, len(series.names) - _MAX_NAMES_IN_TABLE) + series.num_names_left_out
    more = f'<p class="note">{left_out:,} more names are left out.</p>' if left_out else ""
    head = '<th class="n">first</th><th class="n">last</th><th class="n">least</th>'
    return (
        f"<details><summary>{len(rows)} metrics with their first and last numbers</summary>"
        f'<div class="scroll"><table><tr><th>metric</th><th>unit</th>{head}'
        f'<th class="n">most</th><th></th></tr>{"".join(rows)}</table></div>{more}</details>'
    )


def _foot() -> str:
    return (
        f"<footer>Made by gradus {escape(gradus.__version__)} from the files of the run. This page "
        f"is one file, loads nothing and runs no script.</footer>"
    )

"""Which curves of a run a person wants to see, by kind of run, from the names that it recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gradus.report.choice import unit_of
from gradus.report.page.charts import Chart, Line
from gradus.report.series import Axis, RunSeries


@dataclass(frozen=True)
class Figure:
    """Metrics that belong in one chart."""

    title: str
    pattern: str
    """A regular expression; its group `label` names a curve, `per` gives each value a chart."""
    is_share: bool = False
    is_exact: bool = False


_SOURCE = r"(?P<per>[^/]+)"
FIGURES = (
    Figure("Reward", r"episode/(?:(?P<label>[^/]+)/)?reward/mean"),
    Figure("Evaluation", r"eval/(?P<label>(?:[^/]+/)?(?:avg|avg@\d+|pass@1))"),
    Figure("Reward by agent", rf"episode/{_SOURCE}/agent/(?P<label>[^/]+)/reward/mean"),
    Figure("Reward by part", rf"episode/{_SOURCE}/reward/(?P<label>.+)/mean"),
    Figure("Length of an episode", r"episode/(?:(?P<label>[^/]+)/)?length_tokens/mean", True),
    Figure("Loss", r"(?:loss/)?(?P<label>total|rl|ce(_batch|_trace)?|ref_kl|validation/loss)/mean"),
    Figure("Entropy", r"loss/entropy/mean", True),
    Figure("Mismatch KL, trainer against engine", r"loss/mismatch_kl/mean", True),
    Figure("Staleness", r"sample/staleness/(?P<label>mean|max)", True),
    Figure(
        "Shares of episodes",
        r"episode/(?P<label>error|flat|dropped|truncated)/share",
        True,
    ),
    Figure("Gradient norm", r"optimizer/grad_norm", True),
    Figure("Throughput", r"throughput/(?P<label>trained|generated)_tokens_per_second", True),
    Figure("Learning rate", r"optimizer/lr", True, True),
    Figure("Measured by the environment", rf"episode/{_SOURCE}/metric/(?P<label>.+)/mean"),
)
_MAX_CHARTS_PER_FIGURE = 6
_MOST_OF_A_NOTE = 200


def charts(series: RunSeries, over: Axis = "steps") -> list[Chart]:
    return [chart for figure in FIGURES for chart in _charts_of(figure, series, over)]


def x_label(over: Axis) -> str:
    return {"steps": "step", "tokens": "tokens trained"}.get(over, over)


def _charts_of(figure: Figure, series: RunSeries, over: Axis) -> list[Chart]:
    found: dict[str, dict[str, str]] = {}
    for name in series.names:
        match = re.fullmatch(figure.pattern, name, re.DOTALL)
        if match is None:
            continue
        groups = match.groupdict()
        label = groups.get("label") or ("all" if "label" in groups else "")
        found.setdefault(groups.get("per") or "", {})[label] = name
    made = []
    alarmed = _alarmed(series)
    shown = sorted(found.items(), key=lambda it: it[0] not in alarmed)
    rest = [per for per, _ in shown[_MAX_CHARTS_PER_FIGURE:]]
    for per, members in shown[:_MAX_CHARTS_PER_FIGURE]:
        kept = _without_the_sum_of_one(members)
        lines = [Line(label, series.positions(name, over)) for label, name in kept.items()]
        unit = unit_of(next(iter(kept.values())))
        title = f"{figure.title}: {per}" if per else figure.title
        made.append(
            Chart(
                title,
                unit,
                lines,
                x_label=x_label(over),
                is_share=figure.is_share,
                is_exact=figure.is_exact,
            )
        )
    if rest:
        told = f"{len(rest)} more, in All metrics: {', '.join(rest)}"
        made[-1] = replace(
            made[-1], note=told if len(told) < _MOST_OF_A_NOTE else f"{told[:160]} …"
        )
    return made


def _alarmed(series: RunSeries) -> set[str]:
    """Sources of which an alarm sounded: they must not be those that are left out."""
    return {
        name.split("/")[1]
        for name in series.names
        if name.startswith("alarm/") and name.count("/") == 2 and not name.endswith("/value")
        if any(value > 0 for _, value in series.values(name))
    }


def _without_the_sum_of_one(members: dict[str, str]) -> dict[str, str]:
    """Of one source or one component, the number of all together is the same number."""
    if len(members) == 2 and members.keys() & {"all", "total"}:
        return {"": members.get("all") or members["total"]}
    if len(members) == 1:
        return {"": next(iter(members.values()))}
    return {k: members[k] for k in sorted(members, key=lambda label: label != "all")}

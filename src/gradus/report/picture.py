"""Chosen metrics of several runs as a picture, by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from gradus.log import bounded
from gradus.report.compare import Row, RunComparison
from gradus.report.series import Axis

MAX_PANELS = 12
_COLUMNS = 3
_COLOURS = ("#2563c9", "#d2601a", "#1b8a5a", "#8a44b3", "#a8800f", "#c2315f", "#31788c", "#666d76")
_MIN_TO_SMOOTH = 12
_MAX_POINTS = 240
_AXIS = {"steps": "step", "tokens": "tokens trained"}
Points = Sequence[tuple[float, float]]


def draw(comparison: RunComparison, *, over: Axis) -> bytes:
    """A PNG with a panel for each metric; two settings have two colours, else each run has one."""
    rows = [row for row in comparison.rows if any(cell.first is not None for cell in row.cells)]
    rows = rows[:MAX_PANELS]
    columns = min(_COLUMNS, max(1, len(rows)))
    lines = math.ceil(max(1, len(rows)) / columns)
    canvas = Canvas(figsize=(4.3 * columns, 2.9 * lines + 0.6), layout="constrained", dpi=110)
    panels = canvas.subplots(lines, columns, squeeze=False).flatten()
    for panel, row in zip(panels, rows, strict=False):
        _panel(panel, row, comparison, over)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    if rows:
        handles, labels = _legend(comparison, list(panels[: len(rows)]))
        canvas.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    file = io.BytesIO()
    canvas.savefig(file, format="png")
    return file.getvalue()


def _panel(panel: Axes, row: Row, comparison: RunComparison, over: Axis) -> None:
    for place, run in enumerate(comparison.runs):
        points = run.series.positions(row.name, over)
        if not points:
            continue
        shade = run.setting if comparison.is_over_runs else place
        colour = _COLOURS[shade % len(_COLOURS)]
        means = _means(points)
        style = "-" if shade < len(_COLOURS) else "--"
        label = _plain(run.label)
        if len(means) < _MIN_TO_SMOOTH:
            panel.plot(*_columns(means), style, color=colour, marker=".", label=label)
            continue
        panel.plot(*_columns(means), style, color=colour, alpha=0.3, linewidth=0.8)
        panel.plot(*_columns(smoothed(means)), style, color=colour, linewidth=1.8, label=label)
    unit = f" [{row.unit}]" if row.unit else ""
    panel.set_title(_plain(row.name) + unit, fontsize=9, loc="left")
    panel.set_xlabel(_AXIS.get(over, over), fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _legend(comparison: RunComparison, panels: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """One entry for each run that is drawn anywhere, with its setting."""
    found: dict[str, Artist] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    sides = {_plain(run.label): "AB"[run.setting] for run in comparison.runs}
    names = [f"{sides[name]}: {name}" if comparison.is_over_runs else name for name in found]
    return list(found.values()), names


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _plain(text: str) -> str:
    """A name as a picture shows it: `$` would begin a formula, `_` would hide it in a legend."""
    printable = "".join(c if c.isprintable() else "?" for c in bounded(text, 60))
    return printable.replace("$", "\\$").lstrip("_") or "?"


def _means(points: Points) -> list[tuple[float, float]]:
    """Place and mean of at most _MAX_POINTS equal stretches."""
    if len(points) <= _MAX_POINTS:
        return [*points]
    found = []
    for number_of_bin in range(_MAX_POINTS):
        start = len(points) * number_of_bin // _MAX_POINTS
        chunk = points[start : len(points) * (number_of_bin + 1) // _MAX_POINTS]
        xs, ys = [x for x, _ in chunk], [y for _, y in chunk]
        found.append((sum(xs) / len(xs), sum(ys) / len(ys)))
    return found


def smoothed(points: Points) -> list[tuple[float, float]]:
    """The mean of each point and those before it, about an eighth of all; fewer at the beginning.

    One-sided, so that the last number is the mean of as many as any other.

    >>> smoothed([(float(x), float(x % 2)) for x in range(24)])[12]
    (12.0, 0.3333333333333333)
    """
    size = max(3, len(points) // 8)
    ys = [y for _, y in points]
    # Not by sums that go on: what a spike adds to one of them never leaves it whole.
    return [
        (x, math.fsum(ys[max(0, end - size) : end]) / min(size, end))
        for end, (x, _) in enumerate(points, 1)
    ]

"""Charts as SVG, drawn for a page without scripts; colours come from the page's style."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from gradus.report.text import compact, escape, number

MAX_LINES = 8
"""Lines of one chart; there are as many colours."""
MAX_POINTS = 240
"""Points of a line; a longer one is drawn as means, with a band from least to most."""
_WIDTH, _HEIGHT = 460.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 10.0, 10.0, 36.0
_MIN_TO_SMOOTH = 12
_MAX_BARS = 80
_MAX_READINGS = 60
"""Stretches of a chart that tell their numbers when they are pointed at."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """A title, what stands on both axes, and curves."""

    title: str
    unit: str
    """What the numbers are in; empty for plain numbers."""
    lines: Sequence[Line]
    note: str = ""
    x_label: str = "step"
    is_share: bool = False
    """Whether the axis begins at 0, because the size of the numbers matters."""
    is_exact: bool = False
    """Whether the numbers carry no noise, so that nothing is smoothed."""
    bars: Sequence[str] = field(default=())
    """Labels of the parts, when lines are parts of a sum and drawn as stacked bars."""


@dataclass(frozen=True)
class _Frame:
    """Numbers to places in the picture."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def draw(chart: Chart) -> str:
    """The figure of a chart: title, legend, picture; a sentence where there is nothing to draw."""
    lines = [line for line in chart.lines if line.points][:MAX_LINES]
    left_out = len([line for line in chart.lines if line.points]) - len(lines)
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    legend = _legend(lines, left_out, is_sum=bool(chart.bars))
    head = f"<figcaption><b>{escape(chart.title)}</b>{unit}{legend}</figcaption>"
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    if not lines:
        return f'<figure class="chart">{head}<p class="note">no records</p></figure>'
    body = _stacked(chart, lines) if chart.bars else _curves(chart, lines)
    spoken = "; ".join(
        f"{line.label or chart.title}: {number(line.points[0][1])} at first, "
        f"{number(line.points[-1][1])} at last"
        for line in lines
    )
    picture = (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="{escape(f"{chart.title}. {spoken}", limit=600)}">{body}</svg>'
    )
    return f'<figure class="chart">{head}{picture}{note}</figure>'


def _legend(lines: Sequence[Line], left_out: int, *, is_sum: bool) -> str:
    """The last number of each curve, or the mean of each part of a sum."""
    if len(lines) == 1 and not lines[0].label and not left_out:
        last = lines[0].points[-1][1]
        return f'<span class="last">last {number(last)}</span>'
    keys = "".join(
        f'<span class="key"><i class="k{place}"></i>{escape(line.label, limit=60)} '
        f"<em>{number(_mean(line.points) if is_sum else line.points[-1][1])}</em></span>"
        for place, line in enumerate(lines)
    )
    more = f'<span class="key">and {left_out} more</span>' if left_out else ""
    return f'<span class="keys">{keys}{more}</span>'


def _mean(points: Points) -> float:
    return sum(y for _, y in points) / len(points)


def _curves(chart: Chart, lines: Sequence[Line]) -> str:
    frame = _frame(chart, [point for line in lines for point in line.points])
    parts = [_axes(frame, chart)]
    for place, line in enumerate(lines):
        binned = bins(line.points)
        means = [(x, mean) for x, mean, _, _ in binned]
        if len(line.points) > MAX_POINTS:
            upper = [(x, most) for x, _, _, most in binned]
            lower = [(x, least) for x, _, least, _ in reversed(binned)]
            band = frame.path([*upper, *lower])
            parts.append(f'<polygon class="band f{place}" points="{band}"/>')
        if len(means) == 1:
            x, y = means[0]
            parts.append(
                f'<circle class="f{place}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5"/>'
            )
        elif len(means) < _MIN_TO_SMOOTH:
            parts.append(f'<polyline class="line c{place}" points="{frame.path(means)}"/>')
            parts += [
                f'<circle class="f{place}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2"/>'
                for x, y in means
            ]
        else:
            if not chart.is_exact:
                parts.append(f'<polyline class="raw c{place}" points="{frame.path(means)}"/>')
            smooth = frame.path(means if chart.is_exact else smoothed(means))
            parts.append(f'<polyline class="line c{place}" points="{smooth}"/>')
    return "".join([*parts, *_readings(chart, lines, frame)])


def _readings(chart: Chart, lines: Sequence[Line], frame: _Frame) -> Iterator[str]:
    """Stretches that nobody sees, which tell the numbers there: the mean of what lies in each."""
    places = sorted({x for line in lines for x, _ in line.points})
    size = math.ceil(len(places) / _MAX_READINGS)
    starts = places[::size]
    edges = [frame.x0, *(map(fmean, pairwise(starts))), frame.x1]
    found: dict[float, list[str]] = {start: [] for start in starts}
    for line in lines:
        of_stretch: dict[float, list[float]] = {}
        for x, y in line.points:
            of_stretch.setdefault(starts[bisect_right(starts, x) - 1], []).append(y)
        for start, values in of_stretch.items():
            found[start].append(f"{line.label or chart.title} {number(fmean(values))}")
    for start, left, right, end in zip(
        starts, edges, edges[1:], [*places[size - 1 :: size], places[-1]], strict=False
    ):
        where = compact(start) if size == 1 else f"{compact(start)} to {compact(end)}, mean"
        told = escape(f"{chart.x_label} {where}: {'; '.join(found[start])}", limit=600)
        yield (
            f'<rect class="hit" x="{frame.x(left):.1f}" y="{_TOP:g}" '
            f'width="{frame.x(right) - frame.x(left):.1f}" height="{_HEIGHT - _TOP - _BOTTOM:g}">'
            f"<title>{told}</title></rect>"
        )


def _stacked(chart: Chart, lines: Sequence[Line]) -> str:
    """Bars of parts on top of each other; each bar is the mean of its steps."""
    columns: dict[float, list[float]] = {}
    for place, line in enumerate(lines):
        for x, y in line.points:
            columns.setdefault(x, [0.0] * len(lines))[place] += max(0.0, y)
    rows = sorted(columns.items())
    size = math.ceil(len(rows) / _MAX_BARS)
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    bars = [
        (
            chunk[0][0],
            chunk[-1][0],
            [sum(v) / len(chunk) for v in zip(*(h for _, h in chunk), strict=True)],
        )
        for chunk in chunks
    ]
    tops = [(x, sum(heights)) for x, _, heights in bars]
    half = (rows[-1][0] - rows[0][0]) / max(1, len(rows) - 1) / 2 or 0.5
    places = [*tops, (rows[0][0] - half, 0.0), (rows[-1][0] + half, 0.0)]
    frame = _frame(chart, places)
    parts = [_axes(frame, chart)]
    for first, last, heights in bars:
        left, right = frame.x(first - half), frame.x(last + half)
        base = 0.0
        for place, height in enumerate(heights):
            top, bottom = frame.y(base + height), frame.y(base)
            base += height
            if bottom - top < 0.05:
                continue
            parts.append(
                f'<rect class="f{place}" x="{left + 0.4:.1f}" y="{top:.1f}" '
                f'width="{max(0.6, right - left - 0.8):.1f}" height="{bottom - top:.1f}"/>'
            )
    return "".join(parts)


def _frame(chart: Chart, points: Points) -> _Frame:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    if chart.is_share or chart.bars:
        low = min(low, 0.0)
    if high - low < max(abs(high), abs(low), 1e-12) * 1e-9:
        reach = abs(high) * 0.1 or 0.5
        low, high = (low if chart.is_share else low - reach), high + reach
    room = (high - low) * 0.06
    low = low if low == 0 and (chart.is_share or chart.bars) else low - room
    left, right = min(xs), max(xs)
    if right <= left:
        left, right = left - 0.5, right + 0.5
    return _Frame(left, right, low, high + room)


def _axes(frame: _Frame, chart: Chart) -> str:
    parts = []
    for tick in ticks(frame.y0, frame.y1, 4):
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" ')
        parts.append(f'y2="{y:.1f}"/><text class="tick end" x="{_LEFT - 6:g}" y="{y + 4:.1f}">')
        parts.append(f"{compact(tick)}</text>")
    foot = _HEIGHT - _BOTTOM
    is_whole = chart.x_label == "step"
    for tick in ticks(frame.x0, frame.x1, 6):
        if is_whole and tick != int(tick):
            continue
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot:g}" ')
        parts.append(f'y2="{foot + 4:g}"/><text class="tick mid" x="{x:.1f}" y="{foot + 16:g}">')
        parts.append(f"{compact(tick)}</text>")
    parts.append(f'<line class="axis" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" ')
    parts.append(f'y1="{foot:g}" y2="{foot:g}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick mid" x="{middle:g}" y="{_HEIGHT - 4:g}">')
    parts.append(f"{escape(chart.x_label)}</text>")
    return "".join(parts)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two others.

    >>> ticks(0.03, 0.97, 4)
    [0.25, 0.5, 0.75]
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * power for s in (1, 2, 2.5, 5, 10, 20) if span / (s * power) <= most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def bins(points: Points) -> list[tuple[float, float, float, float]]:
    """Place, mean, least and most of at most MAX_POINTS equal stretches, the last one included."""
    if len(points) <= MAX_POINTS:
        return [(x, y, y, y) for x, y in points]
    found = []
    for number_of_bin in range(MAX_POINTS):
        start = len(points) * number_of_bin // MAX_POINTS
        chunk = points[start : len(points) * (number_of_bin + 1) // MAX_POINTS]
        xs, ys = [x for x, _ in chunk], [y for _, y in chunk]
        found.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
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


def sparkline(points: Points) -> str:
    """A small curve without axes, for a row of a table."""
    means = [(x, mean) for x, mean, _, _ in bins(points)][:: max(1, min(len(points), 240) // 48)]
    if len(means) < 2:
        return ""
    ys = [y for _, y in means]
    low, span = min(ys), (max(ys) - min(ys)) or 1.0
    x0, wide = means[0][0], (means[-1][0] - means[0][0]) or 1.0
    path = " ".join(
        f"{(x - x0) / wide * 98 + 1:.0f},{19 - (y - low) / span * 18:.0f}" for x, y in means
    )
    return f'<svg class="spark" viewBox="0 0 100 20"><polyline class="c0" points="{path}"/></svg>'

"""The metrics of a run over its steps: every record of a short run, a fair sample of a long one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from gradus.report.bounded import parse_object, sampled_lines

Axis = Literal["steps", "tokens", "minutes"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "minutes")
TOKENS = "batch/tokens/sum"
EVALUATION = "eval/version"
"""A record with this metric is about an evaluated version instead of a trained step."""

_RESERVED = ("step", "time", "non_finite")
_LARGEST = 1e100
"""Numbers from here on count as not finite: sums of their squares would not be."""
_MAX_BYTES = 48 << 20
_NUM_PLACES = 2_000
_TAIL_BYTES = 3 << 20
_MAX_NAMES = 4_000
"""More distinct names than this are left out, and counted."""


@dataclass(frozen=True)
class Point:
    """One record."""

    step: int
    time: float | None
    """Seconds since 1970. None in a record without."""
    metrics: Mapping[str, float]
    non_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSeries:
    """The records of a run by kind, in the order in which they were written.

    >>> read_series(run_dir.metrics).values("loss/entropy/mean")  # doctest: +SKIP
    [(0, 1.2), (1, 1.1)]
    """

    steps: Sequence[Point] = ()
    """Records of trained steps."""
    evaluations: Sequence[Point] = ()
    """Records of evaluated versions."""
    is_sampled: bool = False
    """Whether the file was too long to read all of it."""
    num_names_left_out: int = 0
    names: Sequence[str] = field(default=())
    """Metrics of trained steps, then those of evaluations alone, in the order of appearance."""

    def of(self, name: str) -> Sequence[Point]:
        """The records that a metric stands in: evaluations only for one of theirs."""
        return self.evaluations if name.startswith("eval/") and self.evaluations else self.steps

    def values(self, name: str) -> list[tuple[Point, float]]:
        """The finite values of a metric with their records."""
        return [(p, p.metrics[name]) for p in self.of(name) if name in p.metrics]

    def non_finite(self) -> dict[str, list[int]]:
        """Metric → steps in which it was NaN or infinite."""
        found: dict[str, list[int]] = {}
        for point in (*self.steps, *self.evaluations):
            for name in point.non_finite:
                found.setdefault(name, []).append(point.step)
        return found

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Names that match any pattern, by pattern; `*` and `?` as in a shell.

        >>> RunSeries(names=["a/b", "a/c"]).matching(["a/c", "a/*"])
        ['a/c', 'a/b']
        """
        found = [name for p in patterns for name in sorted(self.names) if fnmatchcase(name, p)]
        return list(dict.fromkeys(found))

    def positions(self, name: str, over: Axis) -> list[tuple[float, float]]:
        """Place on the axis and value; steps count from 1, tokens and minutes from the start."""
        places = self._places(over)
        points = ((places(point), value) for point, value in self.values(name))
        return [(x, y) for x, y in points if x is not None]

    def _places(self, over: Axis) -> _Places:
        if over == "tokens":
            return _TokensSoFar(self.steps)
        if over == "minutes":
            times = [p.time for p in (*self.steps, *self.evaluations) if p.time is not None]
            return _MinutesSince(min(times, default=0.0))
        return _StepNumber({id(point) for point in self.evaluations})


_Places = Callable[[Point], float | None]
"""Where a point lies on the axis; None leaves it out."""


@dataclass(frozen=True)
class _StepNumber:
    evaluated: set[int]

    def __call__(self, point: Point) -> float:
        # An evaluation is of version v, which v steps have made; a step's record counts from 0.
        return float(point.step if id(point) in self.evaluated else point.step + 1)


@dataclass(frozen=True)
class _MinutesSince:
    start: float

    def __call__(self, point: Point) -> float | None:
        return None if point.time is None else (point.time - self.start) / 60


class _TokensSoFar:
    """Tokens trained until a step; where steps are left out, the mean of its neighbours stands."""

    def __init__(self, steps: Sequence[Point]) -> None:
        self._at: dict[int, float] = {}
        total, before, last_step = 0.0, None, -1
        for point in steps:
            tokens = point.metrics.get(TOKENS)
            if tokens is None:
                continue
            missing = point.step - last_step - 1
            if missing > 0:
                total += missing * (tokens if before is None else (tokens + before) / 2)
            total += tokens
            before, last_step = tokens, point.step
            self._at[point.step] = total

    def __call__(self, point: Point) -> float | None:
        # The version that is evaluated has learned from the steps before its number.
        return self._at.get(point.step - 1 if EVALUATION in point.metrics else point.step)


def read_series(path: Path) -> RunSeries:
    """The records of `metrics.jsonl`; empty when there is none."""
    steps: list[Point] = []
    evaluations: list[Point] = []
    names: dict[str, None] = {}
    late: dict[str, None] = {}
    left_out: set[str] = set()
    for point in _points(path):
        is_evaluation = EVALUATION in point.metrics
        known = late if is_evaluation else names
        for name in (*point.metrics, *point.non_finite):
            if name in known:
                continue
            if len(known) < _MAX_NAMES:
                known[name] = None
            elif len(left_out) < _MAX_NAMES:
                left_out.add(name)
        (evaluations if is_evaluation else steps).append(point)
    return RunSeries(
        steps,
        evaluations,
        is_sampled=path.is_file() and path.stat().st_size > _MAX_BYTES,
        num_names_left_out=len(left_out),
        names=list(dict.fromkeys([*names, *late])),
    )


def _points(path: Path) -> Iterator[Point]:
    lines = sampled_lines(
        path, max_bytes=_MAX_BYTES, num_places=_NUM_PLACES, tail_bytes=_TAIL_BYTES
    )
    for line in lines:
        value = parse_object(line)
        point = None if value is None else _point(value)
        if point is not None:
            yield point


def _point(value: Mapping[str, Any]) -> Point | None:
    step = value.get("step")
    if type(step) is not int or abs(step) > _LARGEST:
        return None
    time: Any = value.get("time")
    listed = value.get("non_finite")
    metrics: dict[str, float] = {}
    non_finite = [str(name) for name in listed] if isinstance(listed, list) else []
    for name, number in value.items():
        if name in _RESERVED or type(number) not in (int, float):
            continue
        if abs(number) < _LARGEST:
            metrics[name] = float(number)
        elif name not in non_finite:
            non_finite.append(name)
    is_known = isinstance(time, int | float) and abs(time) < _LARGEST
    return Point(step, float(time) if is_known else None, metrics, tuple(non_finite))

"""The metrics of a run over its steps: every record of a short run, a fair sample of a long one."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from gradus.run.json_lines import BrokenLines
from gradus.run.paths import RunDirectory
from gradus.run.records import Record, is_sampled, read_cuts, sample_records

Axis = Literal["steps", "tokens", "minutes", "episodes"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "minutes", "episodes")
TOKENS, EPISODES = "batch/tokens/sum", "episode/ended/sum"
SECONDS = "time/step_seconds"

_LARGEST = 1e100
"""Numbers from here on count as not finite: sums of their squares would not be."""
_MAX_NAMES = 4_000
"""More distinct names than this are left out, and counted."""


@dataclass(frozen=True)
class RunSeries:
    """The records of a run by kind, in the order in which they were written.

    >>> read_series(run_dir.metrics).values("loss/entropy/mean")  # doctest: +SKIP
    [(0, 1.2), (1, 1.1)]
    """

    steps: Sequence[Record] = ()
    """Records of trained steps."""
    evaluations: Sequence[Record] = ()
    """Records of evaluated versions."""
    is_sampled: bool = False
    """Whether the file was too long to read all of it."""
    num_names_left_out: int = 0
    broken: BrokenLines = field(default_factory=BrokenLines)
    """Lines that hold no record."""
    names: Sequence[str] = field(default=())
    """Metrics of trained steps, then those of evaluations alone, in the order of appearance."""
    resumed: Sequence[int] = ()
    """The first steps of its later launches."""

    def of(self, name: str) -> Sequence[Record]:
        """The records that a metric stands in: evaluations only for one of theirs."""
        return self.evaluations if name.startswith("eval/") and self.evaluations else self.steps

    def values(self, name: str) -> list[tuple[Record, float]]:
        return [(p, p.metrics[name]) for p in self.of(name) if name in p.metrics]

    def non_finite(self) -> dict[str, list[int]]:
        """Metric → where it was NaN or infinite: steps from 1, of an evaluation its version."""
        found: dict[str, list[int]] = {}
        for point in (*self.steps, *self.evaluations):
            for name in point.non_finite:
                found.setdefault(name, []).append(int(_step_number(point)))
        return found

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Names that match any pattern, by pattern; `*` and `?` as in a shell.

        >>> RunSeries(names=["a/b", "a/c"]).matching(["a/c", "a/*"])
        ['a/c', 'a/b']
        """
        found = [name for p in patterns for name in sorted(self.names) if fnmatchcase(name, p)]
        return list(dict.fromkeys(found))

    def positions(self, name: str, over: Axis) -> list[tuple[float, float]]:
        """Place on the axis and value; steps count from 1, the others from the start."""
        places = self._places(over)
        points = ((places(point), value) for point, value in self.values(name))
        return [(x, y) for x, y in points if x is not None]

    def end(self, over: Axis) -> float | None:
        """Where its last step lies; None for a run without one, or that counts no tokens."""
        places = self._places(over)
        return max((x for point in self.steps if (x := places(point)) is not None), default=None)

    def until(self, end: float, over: Axis) -> RunSeries:
        """The same without what lies behind a place, or nobody knows where."""
        places = self._places(over)

        def kept(points: Sequence[Record]) -> list[Record]:
            if not self.steps:
                return list(points)
            return [it for it in points if (x := places(it)) is not None and x <= end]

        return replace(self, steps=kept(self.steps), evaluations=kept(self.evaluations))

    def _places(self, over: Axis) -> _Places:
        if over in ("tokens", "episodes"):
            return _SumSoFar(self.steps, TOKENS if over == "tokens" else EPISODES)
        if over == "minutes":
            times = (point.time for point in (*self.steps, *self.evaluations))
            return _MinutesSince(min(times, default=0.0), tuple(self._pauses()))
        return _step_number

    def _pauses(self) -> Iterator[tuple[float, float]]:
        """From the last step of a launch to the beginning of the next one's first."""
        for before, after in itertools.pairwise(self.steps):
            if any(before.step < step <= after.step for step in self.resumed):
                yield before.time, after.time - after.metrics.get(SECONDS, 0.0)


_Places = Callable[[Record], float | None]
"""Where a point lies on the axis; None leaves it out."""


def _step_number(point: Record) -> float:
    # An evaluation is of version v, which v steps have made; a step's record counts from 0.
    return float(point.step if point.is_evaluation else point.step + 1)


@dataclass(frozen=True)
class _MinutesSince:
    start: float
    pauses: Sequence[tuple[float, float]]

    def __call__(self, point: Record) -> float:
        paused = sum(max(0.0, min(point.time, end) - begin) for begin, end in self.pauses)
        return (point.time - self.start - paused) / 60


class _SumSoFar:
    """The sum of a metric until a step; of steps left out the mean of its neighbours stands."""

    def __init__(self, steps: Sequence[Record], name: str) -> None:
        self._at: dict[int, float] = {}
        total, before, last_step = 0.0, None, -1
        for point in steps:
            count = point.metrics.get(name)
            if count is None:
                continue
            missing = point.step - last_step - 1
            if missing > 0:
                total += missing * (count if before is None else (count + before) / 2)
            total += count
            before, last_step = count, point.step
            self._at[point.step] = total
        self._known = sorted(self._at)

    def __call__(self, point: Record) -> float | None:
        if not point.is_evaluation or not self._at:
            return self._at.get(point.step)
        # The version that is evaluated has learned from the steps before its number.
        before = bisect_left(self._known, point.step)
        return self._at[self._known[before - 1]] if before else 0.0


def read_series(path: Path) -> RunSeries:
    """The records of `metrics.jsonl`; empty when there is none."""
    collected = CollectedSeries()
    for record in sample_records(path, broken=collected.broken):
        collected.add(record)
    return collected.series(is_sampled=is_sampled(path), run_dir=RunDirectory(path.parent))


class CollectedSeries:
    """Collects records as they come.

    >>> collected = CollectedSeries()
    >>> collected.add(Record(0, 1.0, {"loss/total/mean": 2.0}))
    >>> collected.series().names
    ['loss/total/mean']
    """

    def __init__(self) -> None:
        self.broken = BrokenLines()
        self._steps: list[Record] = []
        self._evaluations: list[Record] = []
        self._names: dict[str, None] = {}
        self._late: dict[str, None] = {}
        self._left_out: set[str] = set()

    def add(self, record: Record) -> None:
        record = _drawable(record)
        known = self._late if record.is_evaluation else self._names
        for name in (*record.metrics, *record.non_finite):
            if name in known:
                continue
            if len(known) < _MAX_NAMES:
                known[name] = None
            elif len(self._left_out) < _MAX_NAMES:
                self._left_out.add(name)
        (self._evaluations if record.is_evaluation else self._steps).append(record)

    def series(self, *, is_sampled: bool = False, run_dir: RunDirectory | None = None) -> RunSeries:
        """All records so far; those that are added later show in it too. `run_dir` says where the
        run was resumed."""
        return RunSeries(
            self._steps,
            self._evaluations,
            is_sampled=is_sampled,
            num_names_left_out=len(self._left_out),
            broken=self.broken,
            names=list(dict.fromkeys([*self._names, *self._late])),
            resumed=[] if run_dir is None else [cut.step for cut in read_cuts(run_dir)],
        )


def _drawable(record: Record) -> Record:
    """The record with numbers that are too large among those that are not finite."""
    large = [name for name, number in record.metrics.items() if abs(number) >= _LARGEST]
    if not large:
        return record
    finite = {name: number for name, number in record.metrics.items() if name not in large}
    return replace(record, metrics=finite, non_finite=(*record.non_finite, *large))

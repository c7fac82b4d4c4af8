"""The records of a run: the one reader of `metrics.jsonl`, whole, sampled, or while it grows.

A resume cuts the file back to its checkpoint before it appends to it again, and notes the cut in
`cuts.jsonl`. So whoever reads the file from its beginning meets each step once; whoever follows it
learns from a `Block` that what it read of some step and later is void.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from gradus.run.json_lines import (
    BrokenLines,
    RawLine,
    parse_object,
    read_objects,
    sampled_lines,
    whole_lines,
)
from gradus.run.paths import RunDirectory

RESERVED_KEYS = ("step", "time", "non_finite")
"""Keys of a record that are not metrics."""

EVALUATION = "eval/version"
"""A record with this metric is about an evaluated version instead of a trained step."""

_BLOCK_BYTES = 1 << 18
_MAX_STEP = 2**53
_MAX_SECONDS = 1e11
_SAMPLED_FROM_BYTES = 48 << 20
_NUM_SAMPLES = 2_000
_SAMPLED_TAIL_BYTES = 3 << 20


@dataclass(frozen=True)
class Record:
    """One line of `metrics.jsonl`. Several may have the same step: an evaluation has its own."""

    step: int
    """From 0. Of an evaluation, the version."""
    time: float
    """When it was recorded, in seconds since 1970."""
    metrics: Mapping[str, float]
    """Finite numbers; names as in the file."""
    non_finite: tuple[str, ...] = ()
    """Names of metrics that were NaN or infinite."""

    @property
    def is_evaluation(self) -> bool:
        return EVALUATION in self.metrics

    @property
    def numbers(self) -> dict[str, float]:
        """All metrics; NaN for those that were not finite."""
        return dict(self.metrics) | dict.fromkeys(self.non_finite, math.nan)


@dataclass(frozen=True)
class Cut:
    """A resume went back to an earlier place of `metrics.jsonl`."""

    num_bytes: int
    """What was left of the file."""
    step: int
    """The first step that is done again."""


@dataclass(frozen=True)
class Place:
    """A place in `metrics.jsonl`, before which everything was read."""

    offset: int = 0
    """Bytes of the file."""
    num_cuts: int = 0
    """How many cuts of the file are accounted for."""
    resume_step: int | None = None
    """The run went back: what was read of this step and later is void. None while nothing is."""


SomePlace = TypeVar("SomePlace", bound=Place)


@dataclass(frozen=True)
class Block(Generic[SomePlace]):
    """Records that follow each other in the file."""

    records: Sequence[Record]
    after: SomePlace
    """The place behind them."""
    was_cut: bool = False
    """The file went back to before the place: `after` lies there, and there are no records."""
    broken: BrokenLines = field(default_factory=BrokenLines)


class RecordTail:
    """Follows the records of a run."""

    def __init__(self, run_dir: RunDirectory, place: Place) -> None:
        self._run_dir = run_dir
        self.place = place

    def read(self) -> Iterator[Record]:
        """Records since the last call, block by block; none while there is no file."""
        while (block := read_block(self._run_dir, self.place)).after != self.place:
            self.place = block.after
            yield from block.records


def read_block(
    run_dir: RunDirectory, place: SomePlace, *, num_bytes: int = _BLOCK_BYTES
) -> Block[SomePlace]:
    """Whole lines behind the place, until they have `num_bytes` or more; 1 gives one line."""
    size, lines = 0, list[RawLine]()
    if run_dir.metrics.is_file():
        with run_dir.metrics.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(place.offset)
            lines = list(whole_lines(file, stop=place.offset + num_bytes))
    # After the lines: what was read before a cut is void. Whoever cuts notes it before the file
    # grows again.
    cuts = read_cuts(run_dir)
    if len(cuts) != place.num_cuts:
        after = _cut_back(place, cuts)
        return Block([], after, was_cut=after.offset != place.offset)
    if size < place.offset:
        if _is_being_cut(run_dir):
            return Block([], place)
        # No cut of ours, so nothing is known of what is left.
        return Block([], replace(place, offset=0, resume_step=0), was_cut=True)
    broken = BrokenLines()
    records = list(_records(lines, broken))
    after = replace(place, offset=lines[-1].end) if lines else place
    return Block(records, after, broken=broken)


def read_records(
    path: Path, *, stop: int | None = None, broken: BrokenLines | None = None
) -> Iterator[Record]:
    """The records of a file up to byte `stop`; none where there is no file yet."""
    if path.is_file():
        with path.open("rb") as file:
            yield from _records(whole_lines(file, stop=stop), broken)


def sample_records(path: Path, *, broken: BrokenLines | None = None) -> Iterator[Record]:
    """Every record of a file; of one that `is_sampled`, evenly spread ones and those at its end."""
    lines = sampled_lines(
        path,
        max_bytes=_SAMPLED_FROM_BYTES,
        num_places=_NUM_SAMPLES,
        tail_bytes=_SAMPLED_TAIL_BYTES,
    )
    return _records(lines, broken)


def is_sampled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > _SAMPLED_FROM_BYTES


def parse_record(line: RawLine) -> Record | None:
    """None for a line that a crash cut off, or that is none of ours."""
    value = parse_object(line)
    return None if value is None else _record(value)


def read_cuts(run_dir: RunDirectory) -> list[Cut]:
    found = []
    for value in read_objects(run_dir.cuts):
        try:
            found.append(Cut(int(value["num_bytes"]), int(value["step"])))
        except (ValueError, KeyError, TypeError):  # A kill cut it off; the next resume notes it.
            continue
    return found


def _is_being_cut(run_dir: RunDirectory) -> bool:
    """Whether a cut was announced and is not noted yet."""
    *_, last = ({}, *read_objects(run_dir.cuts))
    return "cutting" in last


def _cut_back(place: SomePlace, cuts: Sequence[Cut]) -> SomePlace:
    for cut in cuts[place.num_cuts :]:
        if cut.num_bytes < place.offset:
            step = cut.step if place.resume_step is None else min(place.resume_step, cut.step)
            place = replace(place, offset=cut.num_bytes, resume_step=step)
    return replace(place, num_cuts=len(cuts))


def _records(
    lines: Iterator[RawLine] | Sequence[RawLine], broken: BrokenLines | None
) -> Iterator[Record]:
    for line in lines:
        record = parse_record(line)
        if record is not None:
            yield record
        elif broken is not None:
            broken.add(line)


def _record(value: dict[str, Any]) -> Record | None:
    step, time, listed = map(value.get, RESERVED_KEYS)
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        return None
    if not isinstance(time, int | float) or not 0 <= time < _MAX_SECONDS:
        return None
    metrics: dict[str, float] = {}
    non_finite = [_as_unicode(str(it)) for it in listed] if isinstance(listed, list) else []
    for name, number in value.items():
        if name in RESERVED_KEYS or not (number is None or type(number) in (int, float)):
            continue
        finite = _finite(number)
        if finite is None:
            non_finite.append(_as_unicode(name))
        else:
            metrics[sys.intern(_as_unicode(name))] = finite
    lost = (name for name in dict.fromkeys(non_finite) if name not in metrics)
    return Record(step, float(time), metrics, tuple(lost))


def _finite(number: float | None) -> float | None:
    try:
        return float(number) if number is not None and math.isfinite(number) else None
    except OverflowError:  # JSON has integers of any size.
        return None


def _as_unicode(name: str) -> str:
    """JSON can hold half a character, which no tracker can."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()

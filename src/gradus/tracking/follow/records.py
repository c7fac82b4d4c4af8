"""The records of a run, read in blocks from a cursor on, and what a cut of the file does to it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradus.monitor import RESERVED_KEYS
from gradus.run.growing_files import Cut, read_cuts
from gradus.run.paths import RunDirectory
from gradus.tracking.base import TrackedRecord
from gradus.tracking.follow.cursor import Cursor

_BLOCK_BYTES = 1 << 18
_NO_RECORD = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Block:
    """Records that follow each other in the file."""

    records: list[TrackedRecord]
    after: Cursor
    """The cursor behind them."""
    was_cut: bool = False
    """The file went back to before the cursor: `after` lies there, and there are no records."""


def first_cursor(run_dir: RunDirectory) -> Cursor:
    """The cursor of a tracker that has nothing."""
    return Cursor(num_cuts=len(read_cuts(run_dir)))


def read_block(run_dir: RunDirectory, cursor: Cursor, *, num_bytes: int = _BLOCK_BYTES) -> Block:
    """Whole lines behind the cursor, until they have `num_bytes` or more; 1 gives one line."""
    try:
        with run_dir.metrics.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(cursor.offset)
            lines = file.readlines(num_bytes)
    except FileNotFoundError:
        size, lines = 0, []
    # After the lines: what was read before a cut is void. Whoever cuts notes it before the file
    # grows again.
    cuts = read_cuts(run_dir)
    if len(cuts) != cursor.num_cuts:
        after = _cut_back(cursor, cuts)
        return Block([], after, was_cut=after.offset != cursor.offset)
    if size < cursor.offset:
        # Nobody of ours did this, so nothing is known of what is left.
        return Block([], replace(cursor, offset=0, resume_step=0), was_cut=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    records = [record for line in lines if (record := parse_record(line)) is not None]
    return Block(
        records,
        replace(
            cursor,
            offset=cursor.offset + sum(map(len, lines)),
            num_sent=cursor.num_sent + len(records),
        ),
    )


def _cut_back(cursor: Cursor, cuts: Sequence[Cut]) -> Cursor:
    for cut in cuts[cursor.num_cuts :]:
        if cut.num_bytes < cursor.offset:
            step = cut.step if cursor.resume_step is None else min(cursor.resume_step, cut.step)
            cursor = replace(cursor, offset=cut.num_bytes, resume_step=step)
    return replace(cursor, num_cuts=len(cuts))


def records_again(run_dir: RunDirectory, cursor: Cursor) -> Iterator[TrackedRecord]:
    """Records before the cursor that a tracker loses when it voids `cursor.resume_step` and later.

    The evaluation of the version that a run goes on from is one: it has the number of the next
    step and is not done again.
    """
    if cursor.resume_step is None or not run_dir.metrics.is_file():
        return
    with run_dir.metrics.open("rb") as file:
        read = 0
        for line in file:
            read += len(line)
            if read > cursor.offset:
                return
            record = parse_record(line)
            if record is not None and record.step >= cursor.resume_step:
                yield record


def num_unsent(run_dir: RunDirectory, cursor: Cursor) -> int:
    """Records behind the cursor."""
    count = 0
    block = read_block(run_dir, cursor)
    while block.records or block.was_cut or block.after != cursor:
        count += len(block.records)
        cursor = block.after
        block = read_block(run_dir, cursor)
    return count


def parse_record(line: bytes) -> TrackedRecord | None:
    """None for a line that a crash cut off, or that is none of ours."""
    try:
        value: dict[str, Any] = json.loads(line)
        step, time = value["step"], float(value["time"])
    except _NO_RECORD:
        return None
    if type(step) is not int:
        return None
    try:
        metrics = {
            _as_unicode(name): float(number)
            for name, number in value.items()
            if name not in RESERVED_KEYS and type(number) in (int, float) and math.isfinite(number)
        }
    except OverflowError:
        return None
    names = value.get("non_finite")
    non_finite = tuple(_as_unicode(str(it)) for it in names) if isinstance(names, list) else ()
    return TrackedRecord(step, time, metrics, non_finite)


def _as_unicode(name: str) -> str:
    """JSON can hold half a character, which no tracker can."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()

"""Lines and records as another process writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Record:
    """One record: the numbers of one step."""

    step: int
    metrics: dict[str, float]
    """Finite metrics only."""

    @property
    def is_evaluation(self) -> bool:
        """Whether it is about an evaluated version instead of a trained step."""
        return "eval/version" in self.metrics


class LineTail:
    """Follows one file; a line counts once its end is written.

    >>> LineTail(run_dir.notices, skips_old=True).read()  # doctest: +SKIP
    [b"first TaskError in train environment 'words': no answer (task 3, episode g000001.0)"]
    """

    def __init__(self, path: Path, *, skips_old: bool = False) -> None:
        """`skips_old` leaves out what the file holds already."""
        self._path = path
        self._offset = path.stat().st_size if skips_old and path.is_file() else 0

    def read(self) -> list[bytes]:
        """Lines since the last call; [] while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()


class MetricsTail:
    """Follows the records of a run from its beginning.

    >>> MetricsTail(run_dir.metrics).read()  # doctest: +SKIP
    [Record(step=0, metrics={'episode/reward/mean': 0.5})]
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def read(self) -> list[Record]:
        """Records since the last call; [] while there is no file."""
        found = (_parse(line) for line in self._lines.read())
        return [record for record in found if record is not None]


def iter_records(tail: MetricsTail) -> Iterator[Record]:
    """All records that are there already."""
    while found := tail.read():
        yield from found


def _parse(line: bytes) -> Record | None:
    """None for a line that a crash cut off."""
    try:
        value = json.loads(line)
        step = int(value.pop("step"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    value.pop("time", None)
    numbers = {k: float(v) for k, v in value.items() if isinstance(v, int | float)}
    return Record(step, numbers)

"""`machine.jsonl` of a run: what its processes take of their machine, a line every ten seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gradus.errors import ConfigError
from gradus.run.json_lines import last_lines
from gradus.run.paths import RunDirectory

MACHINE_SECONDS = 10.0
"""Between two looks at the machine."""
FORMAT = 1
_TAIL_BYTES = 4 << 20


class MachineNumbers(msgspec.Struct, frozen=True):
    """One look at the machine that the launcher runs on."""

    format: int
    """Of the file; the first key of each line."""
    time: float
    """Unix seconds."""
    term: int
    numbers: dict[str, float]
    """By the names of the catalogue, `machine/...`."""


def read_machine(run_dir: RunDirectory, *, max_bytes: int = _TAIL_BYTES) -> list[MachineNumbers]:
    """The newest looks, oldest first; a line that was cut off is none.

    ConfigError for a file that a newer gradus wrote.
    """
    found = []
    for path in (run_dir.older_machine, run_dir.machine):
        for line in last_lines(path, max_bytes=max_bytes):
            try:
                look = msgspec.json.decode(line.content or b"", type=MachineNumbers)
            except (msgspec.DecodeError, RecursionError):
                continue
            if look.format > FORMAT:
                raise ConfigError(
                    f"{path} has format {look.format}; this gradus reads up to {FORMAT}: use a "
                    "newer one"
                )
            found.append(look)
    return found


@dataclass
class MachineTail:
    """The look at the machine that belongs to a record: the last before it.

    >>> MachineTail(RunDirectory(Path("runs/demo"))).at(1795690443.4)
    {}
    """

    run_dir: RunDirectory
    _read: tuple[int, int] = (-1, -1)
    _looks: Sequence[MachineNumbers] = field(default_factory=list)

    def at(self, time: float) -> dict[str, float]:
        """Its numbers; none where it was looked at too long before, or not at all."""
        sizes = (_size(self.run_dir.older_machine), _size(self.run_dir.machine))
        if sizes != self._read:
            try:
                self._looks = read_machine(self.run_dir)
            except (ConfigError, OSError):  # A tracker does not need them.
                self._looks = []
            self._read = sizes
        place = bisect_right(self._looks, time, key=lambda it: it.time) - 1
        if place < 0 or time - self._looks[place].time > 3 * MACHINE_SECONDS:
            return {}
        return self._looks[place].numbers


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1

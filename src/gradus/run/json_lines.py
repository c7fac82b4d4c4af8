"""JSON lines of a file that may be huge, damaged and still growing, read in bounded memory.

A line counts once its newline is written. One that holds no JSON object is counted and named in a
`BrokenLines`, and costs nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_LINE_BYTES = 17 << 20
"""A longer line counts as broken. The record of an episode has at most 16 MiB."""

_READ_BYTES = 8 << 20
_SKIP_BYTES = 1 << 20


class RawLine(NamedTuple):
    """A line and where it lies in its file."""

    start: int
    end: int
    content: bytes | None
    """None for a line of more than MAX_LINE_BYTES."""


@dataclass
class BrokenLines:
    """The lines of a file that were passed over.

    >>> broken = BrokenLines()
    >>> broken.add(RawLine(81, 86, b"[1]"))
    >>> str(broken)
    '1 line that cannot be read, the first at byte 81'
    """

    count: int = 0
    first_byte: int | None = None
    """Where the first one begins."""

    def add(self, line: RawLine) -> None:
        """Count a line; an empty one is not broken."""
        if line.content is None or line.content.strip():
            self.count += 1
            self.first_byte = line.start if self.first_byte is None else self.first_byte

    def __str__(self) -> str:
        lines = "line" if self.count == 1 else "lines"
        return f"{self.count:,} {lines} that cannot be read, the first at byte {self.first_byte}"


def whole_lines(file: BinaryIO, *, stop: int | None = None) -> Iterator[RawLine]:
    """Lines from where the file stands; `stop` is the last place where one may begin."""
    start = file.tell()
    while stop is None or start < stop:
        content: bytes | None = file.readline(MAX_LINE_BYTES)
        if not content or not content.endswith(b"\n"):
            if len(content or b"") < MAX_LINE_BYTES or not _skip_line(file):
                return
            content = None
        end = file.tell()
        yield RawLine(start, end, content)
        start = end


def parse_object(line: RawLine) -> dict[str, Any] | None:
    """The JSON object of a line; None for a line that a kill cut off, and for anything else."""
    try:
        value = json.loads(line.content or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; none when it is missing or no plain file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in whole_lines(file):
            if (value := parse_object(line)) is not None:
                yield value


def sampled_lines(
    path: Path, *, max_bytes: int, num_places: int, tail_bytes: int
) -> Iterator[RawLine]:
    """All lines of a file up to `max_bytes`; of a longer one evenly spread lines and its end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > max_bytes:
            start_of_tail = size - tail_bytes
            yield from _spread_lines(file, start_of_tail, num_places)
            if file.tell() < start_of_tail:
                file.seek(start_of_tail)
                _skip_line(file)
        yield from whole_lines(file)


def last_lines(path: Path, *, max_bytes: int) -> list[RawLine]:
    """The lines of a file's last `max_bytes`, none of them cut at its beginning."""
    if not path.is_file() or path.is_symlink():  # a folder that was sent may point anywhere
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        if size > max_bytes:
            _skip_line(file)
        return list(whole_lines(file))


class LineTail:
    """Follows a file that only grows."""

    def __init__(self, path: Path, *, skips_old: bool = False) -> None:
        """`skips_old` leaves out what the file holds already."""
        self._path = path
        self._offset = path.stat().st_size if skips_old and path.is_file() else 0

    def read(self) -> list[str]:
        """Lines since the last call, at most some megabytes; [] while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                lines = list(whole_lines(file, stop=self._offset + _READ_BYTES))
        except FileNotFoundError:
            return []
        self._offset = lines[-1].end if lines else self._offset
        return [it.content.decode(errors="replace").rstrip("\r\n") for it in lines if it.content]


def _spread_lines(file: BinaryIO, stop: int, num_places: int) -> Iterator[RawLine]:
    """The lines behind evenly spread places before `stop`."""
    for place in range(num_places):
        wanted = stop * place // num_places
        if place and wanted < file.tell():
            continue
        file.seek(wanted)
        if place:
            _skip_line(file)
        yield from islice(whole_lines(file), 1)


def _skip_line(file: BinaryIO) -> bool:
    """Go behind the next newline; False where there is none."""
    while chunk := file.readline(_SKIP_BYTES):
        if chunk.endswith(b"\n"):
            return True
    return False

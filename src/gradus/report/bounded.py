"""JSON lines of a file of any size, in bounded time and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE_BYTES = 8 << 20
"""A longer line is passed over: its text would fill more than a page."""
_SKIP_BYTES = 1 << 20


def read_lines(file: BinaryIO, *, end: int | None = None) -> Iterator[bytes]:
    """Whole lines from where the file stands; those that are too long or cut off are left out."""
    while end is None or file.tell() < end:
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            return
        if not line.endswith(b"\n"):
            if len(line) < MAX_LINE_BYTES:
                yield line  # The last one: whole unless it does not parse.
                return
            _skip_line(file)
            continue
        yield line


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for a line that a kill cut off, and for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def head_objects(path: Path, *, max_bytes: int, max_objects: int) -> Iterator[dict[str, Any]]:
    """The first objects of a file; none when it is missing or is no plain file."""
    if not path.is_file():
        return
    found = 0
    with path.open("rb") as file:
        for line in read_lines(file, end=max_bytes):
            value = parse_object(line)
            if value is None:
                continue
            yield value
            found += 1
            if found >= max_objects:
                return


def tail_lines(path: Path, *, max_bytes: int) -> list[bytes]:
    """The last lines of a file, none of them cut at its beginning."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        if size > max_bytes:
            _skip_line(file)
        return list(read_lines(file))


def sampled_lines(
    path: Path, *, max_bytes: int, num_places: int, tail_bytes: int
) -> Iterator[bytes]:
    """All lines of a file up to `max_bytes`; of a longer one evenly spread lines and its end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= max_bytes:
            yield from read_lines(file)
            return
        start_of_tail = size - tail_bytes
        for place in range(num_places):
            wanted = start_of_tail * place // num_places
            if wanted < file.tell() and place:
                continue
            file.seek(wanted)
            if place:
                _skip_line(file)
            line = file.readline(MAX_LINE_BYTES)
            if line.endswith(b"\n") and file.tell() <= start_of_tail:
                yield line
        if file.tell() < start_of_tail:
            file.seek(start_of_tail)
            _skip_line(file)
        yield from read_lines(file)


def _skip_line(file: BinaryIO) -> None:
    while chunk := file.readline(_SKIP_BYTES):
        if chunk.endswith(b"\n"):
            return

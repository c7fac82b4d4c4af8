"""Lines of a file of JSON lines, as rows that reach a worker just as they are written.

Rows travel between processes. What would change on the way, or stop there, is refused here, with
the place of the line: a NaN would arrive as null, and a larger integer would fail every episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError

_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_MAX_DEPTH = 100


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and line, for errors, and the row of each line that is not empty; ConfigError for a file
    that cannot be read. A byte order mark, which Windows writes, is none of the text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, parse_row(line, where)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). A relative path starts where the command "
            "was given"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason}, byte {error.start})") from error


def parse_row(line: str, where: str) -> dict[str, Any]:
    """The object of a line; ConfigError, which begins with `where`, for anything else.

    >>> parse_row('{"prompt": "2 + 2", "answer": 4}', "line 1")
    {'prompt': '2 + 2', 'answer': 4}
    """
    try:
        row = json.loads(
            line, parse_int=_integer, parse_float=_finite, parse_constant=_not_a_number
        )
        is_deep = _depth(row) > _MAX_DEPTH
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ConfigError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a {type(row).__name__}, not a JSON object")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has an escape that is half a character: {error}") from error
    return row


def _integer(text: str) -> int:
    value = int(text)
    if not _MIN_INTEGER <= value <= _MAX_INTEGER:
        raise ValueError(f"{text[:30]} has more than 64 bits; write it as text, in quotes")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:30]} is too large; write it as text, in quotes")
    return value


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a number; write null, or text in quotes")


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0

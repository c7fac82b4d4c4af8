"""Rows of a file that reach a worker just as they are written.

Rows travel between processes. What would change on the way, or stop there, is refused here, with
the place of the row: a NaN would arrive as null, and a larger integer would fail every episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.rows.reading import read_rows

_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_MAX_DEPTH = 100


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and line, for errors, and the row of each line that is not empty; ConfigError for a file
    that cannot be read, and a row that is no object or would not arrive."""
    for where, row in read_rows(path):
        yield where, checked_row(row, where)


def checked_row(row: Any, where: str) -> dict[str, Any]:
    """The row; ConfigError, which begins with `where`, for what is none.

    >>> checked_row({"prompt": "2 + 2", "answer": 4}, "rows.jsonl:1")
    {'prompt': '2 + 2', 'answer': 4}
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a {type(row).__name__}, not a JSON object")
    _check(row, where, _MAX_DEPTH)
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError) as error:
        raise ConfigError(f"{where} holds what is no text or number of JSON: {error}") from error
    return row


def _check(value: Any, where: str, depth: int) -> None:
    if isinstance(value, dict | list):
        if not depth:
            raise ConfigError(f"{where} is nested more than {_MAX_DEPTH} deep")
        for one in value.values() if isinstance(value, dict) else value:
            _check(one, where, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} has {value}, which is no number; write null, or text in quotes")
    elif isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        raise ConfigError(
            f"{where} has {str(value)[:30]}, more than 64 bits; write it as text, in quotes"
        )

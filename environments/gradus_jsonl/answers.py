"""Reward functions for rows that hold their `answer`, and one for those that are not rated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_WORD = re.compile(r"(?:(?<![\w.,/)])-)?[\w.,/]*\d[\w.,/]*")
"""What holds a digit, with its sign."""
_NUMBER = re.compile(r"(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)[A-Za-z]*[.,/]*")
"""One that stands by itself: no part of a fraction, of a word or of a longer number."""
_LONGEST_TAIL = 1000
"""Characters from the end in which a number is looked for."""


def exact_answer(reply: str, row: Mapping[str, Any]) -> float:
    """1 when the reply is the row's `answer`, but for space around it; else 0.

    >>> exact_answer(" 4\\n", {"answer": 4})
    1.0
    """
    return float(reply.strip() == _answer(row))


def last_number(reply: str, row: Mapping[str, Any]) -> float:
    """1 when the last number of the reply is the row's `answer`; else 0.

    >>> last_number("2 + 2 makes 4.", {"answer": "4"})
    1.0
    """
    words = _WORD.findall(re.sub(r"\s*/\s*", "/", reply[-_LONGEST_TAIL:]))
    found = _NUMBER.fullmatch(words[-1]) if words else None
    return float(found is not None and _plain(found[1]) == _plain(_answer(row)))


def unrated() -> float:
    """0 for every reply, where only the replies matter."""
    return 0.0


def _answer(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise ValueError(f"this row has no 'answer'; it has {', '.join(row)}")
    return str(row["answer"]).strip()


def _plain(number: str) -> str:
    """A number without thousands separators and without zeros after the point."""
    plain = number.replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain

"""Reward functions for rows that hold their `answer`, and one for those that are not rated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_PART = r"(?:[\w.,/]|(?<=\d[eE])[-+])*"
_WORD = re.compile(rf"(?:(?<![\w.,/)])-)?(?<![\w.,/])(?![^\W\d]){_PART}\d{_PART}")
"""What holds a digit, with its sign, and does not begin with a letter."""
_NUMBER = re.compile(r"(-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)[A-Za-z]*[.,/]*")
"""One that stands by itself: no part of a fraction, of a word or of a longer number."""
_SIGNS = str.maketrans("\u2212\u2013\u2044\u00f7", "--//")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
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

    Raises:
        ValueError: the row has no `answer`, or one that is no number.

    >>> last_number("2 + 2 makes 4.", {"answer": "4"})
    1.0
    """
    right = _last_number(_answer(row))
    if right is None:
        raise ValueError(
            f"last_number: this row's answer is {row['answer']!r}, which is no number written in "
            "digits; take exact_answer, or a function of your own"
        )
    return float(_last_number(reply[-_LONGEST_TAIL:]) == right)


def unrated() -> float:
    """0 for every reply, where only the replies matter."""
    return 0.0


def _answer(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise ValueError(f"this row has no 'answer'; it has {', '.join(row)}")
    return str(row["answer"]).strip()


def _last_number(text: str) -> Decimal | None:
    """The last number of a text, unless it is part of a fraction or of a power of ten."""
    text = re.sub(r"[$\u20ac\u00a3]", "", _FRACTION.sub(r"\1/\2", text.translate(_SIGNS)))
    words = _WORD.findall(re.sub(r"\s*/\s*", "/", text))
    found = _NUMBER.fullmatch(words[-1]) if words else None
    return None if found is None else Decimal(found[1].replace(",", ""))

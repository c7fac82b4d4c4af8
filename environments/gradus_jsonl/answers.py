"""Reward functions for rows that hold their `answer`, and one for those that are not rated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

_PART = r"(?:[\w.,/]|(?<=\d[eE])[-+])*"
_WORD = re.compile(rf"(?:(?<![\w.,/)])-)?(?<![\w.,/])(?![^\W\d]){_PART}\d{_PART}")
"""What holds a digit, with its sign, and does not begin with a letter."""
_DIGITS = r"(-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)"
_NUMBER = re.compile(_DIGITS + r"(?:[ck]?m/[hs]|[A-Za-z]*)[.,/]*")
"""One that stands by itself: no part of a fraction, of a word or of a longer number."""
_LARGER = (
    r"(?:[kKMB]|bn|mn)\b|\s*\\?\b(?:hundred|thousand|dozen|score|\w*illion|lakh|crore|hal[fv]e?|third|"
    r"quarter|(?:four|fif|six|seven|eigh|nin|ten|dred|sand|lion)th|squared|cubed|factorial|pi|\u03c0)s?\b"
)
_MORE_BEFORE = re.compile(
    r"(?:[\^\u221a]|sqrt|-\s*(?=[({])|[\d)}]\s*(?:[*\u00d7]|\\times|\\cdot)|\d[-:])\s*[({]?$"
)
"""Around a number that is part of another one: a power, a root, a product, a time of day."""
_WORDS = r"(?:(?:square|cubic) )?(?:[mgslhLN]|[^\W\d_]{2,})(?:(?: per |/)[^\W\d_]+)?(?:\^?[23])?"
_WITH_UNIT = re.compile(
    rf"(?:[a-zA-Z]\s*=\s*)?\+?{_DIGITS}(?!{_LARGER})\s*\u00b0?(?:%|{_WORDS})?\.?"
)
_POWER_OF_UNIT = re.compile(r"(?<=\d)(\s*(?:[cdkm]?m|ft|in|yd|mi))\^\{?[23]\}?")
_SIGNS = str.maketrans("\u2212\u2013\u2044\u00f7", "--//")
_CURRENCIES = re.compile("[$\u20ac\u00a3\u00a5]")
_FRACTION = re.compile(r"\\[cdt]?frac(?:\{([^{}]*)\}|(\d))(?:\{([^{}]*)\}|(\d))")
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
        ValueError: the row has no `answer`, or one that is no number with at most its unit.

    >>> last_number("2 + 2 makes 4.", {"answer": "4"})
    1.0
    """
    right = _only_number(_answer(row))
    if right is None:
        raise ValueError(
            f"last_number: this row's answer is {row['answer']!r}, which is no number in digits "
            "with at most a unit after it; take exact_answer, or a function of your own"
        )
    return float(_last_number(reply[-_LONGEST_TAIL:]) == right)


def unrated() -> float:
    """0 for every reply, where only the replies matter."""
    return 0.0


def _answer(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise ValueError(f"this row has no 'answer'; it has {', '.join(row)}")
    return str(row["answer"]).strip()


def _only_number(answer: str) -> Decimal | None:
    """The number that an answer is, alone or behind `####`, but for its currency or unit."""
    with suppress(InvalidOperation):  # as Python writes a number of JSON, such as 1e-07
        if re.fullmatch(r"-?[\d.]+e[-+]\d+", answer):
            return Decimal(answer)
    text = _CURRENCIES.sub("", answer.rpartition("####")[2].translate(_SIGNS))
    found = _WITH_UNIT.fullmatch(text.strip("[]() \n"))
    return None if found is None else Decimal(found[1].replace(",", ""))


def _last_number(text: str) -> Decimal | None:
    """The last number of a text, unless it is part of a fraction or of another expression."""
    text = _CURRENCIES.sub("", _FRACTION.sub(r" \1\2/\3\4", text.translate(_SIGNS)))
    text = _POWER_OF_UNIT.sub(r"\1", re.sub(r"\s*/\s*", "/", text.replace("{,}", ",")))
    words = list(_WORD.finditer(text))
    if not words or _MORE_BEFORE.search(text[: words[-1].start()]):
        return None
    found = _NUMBER.fullmatch(words[-1][0])
    if found is None or re.match(_LARGER, text[words[-1].start() + found.end(1) :]):
        return None
    return Decimal(found[1].replace(",", ""))

"""Compares two numbers or expressions by math-verify, in a helper process."""

from __future__ import annotations

import re

from math_verify import parse, verify

_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\w)")
_NAMES = re.compile(r"[A-Za-z\\{}'(),|\s]*[A-Za-z][A-Za-z\\{}'(),|\s]*")

_DIGITS = 12
"""math-verify's own 6 would take 0.5000001 for a half."""


def names_one_value(answer: str) -> bool:
    r"""Whether an answer with `=` only gives its value a name; math-verify reads the last side.

    >>> names_one_value("x_1 = 7"), names_one_value(r"f(x)=7"), names_one_value("7")
    (True, True, True)
    >>> names_one_value("1=2=7"), names_one_value("1=7"), names_one_value("x=1=7")
    (False, False, False)
    """
    name, equals, value = answer.partition("=")
    if not equals:
        return True
    return "=" not in value and _NAMES.fullmatch(_SUBSCRIPT.sub("", name)) is not None


def are_equal(expected: str, given: str) -> bool:
    """True when both are read and are equal. It may hang; the caller has a deadline."""
    if "=" not in expected and not names_one_value(given):
        return False
    # math-verify's own deadline is an alarm, which the helper needs for itself.
    gold, found = (
        parse(f"$\\boxed{{{answer}}}$", parsing_timeout=0, raise_on_error=False)
        for answer in (expected, given)
    )
    return bool(gold and found and verify(gold, found, float_rounding=_DIGITS, timeout_seconds=0))

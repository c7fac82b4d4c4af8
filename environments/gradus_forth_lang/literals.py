"""How numbers are written."""

from __future__ import annotations

import re

_BASES = {"$": 16, "#": 10, "%": 2}
_FLOAT = re.compile(r"[+-]?\d{1,300}\.?\d{0,300}[eE][+-]?\d{0,3}")
_MAX_DIGITS = 70


def read_number(text: str, base: int) -> list[int] | list[float] | None:
    """The cells that a number leaves, low cell first; None for what is no number.

    >>> read_number("-12", 10), read_number("$ff", 10), read_number("'a'", 10)
    ([-12], [255], [97])
    >>> read_number("12.", 10), read_number("1.5e", 10), read_number("12x", 10)
    ([12, 0], [1.5], None)
    """
    if len(text) == 3 and text[0] == text[2] == "'":
        return [ord(text[1])] if ord(text[1]) < 256 else None
    if base == 10 and _FLOAT.fullmatch(text):
        # Forth allows an exponent without digits.
        value = float(text if text[-1].isdigit() else f"{text}0")
        return [value] if abs(value) != float("inf") else None
    digits, is_double = (text[:-1], True) if text.endswith(".") else (text, False)
    if digits[:1] in _BASES:
        digits, base = digits[1:], _BASES[digits[0]]
    value = _integer(digits, base)
    if value is None:
        return None
    return [value, value >> 64] if is_double else [value]


def _integer(digits: str, base: int) -> int | None:
    body = digits[1:] if digits[:1] in ("-", "+") else digits
    if not (body.isascii() and body.isalnum()) or len(body) > _MAX_DIGITS:
        return None
    try:
        return int(digits, base)
    except ValueError:
        return None

"""Amounts are whole cents."""

from __future__ import annotations


def parse_amount(text: str) -> int:
    """Cents of `12`, `-3.5` or `1,234.56`; ValueError for anything else."""
    plain = text.strip().replace(",", "")
    sign = -1 if plain.startswith("-") else 1
    whole, point, part = plain.lstrip("+-").partition(".")
    if not whole.isdigit() or (point and not part.isdigit()) or len(part) > 2:
        raise ValueError(f"not an amount: {text!r}")
    return sign * (int(whole) * 100 + int(part.ljust(2, "0")))


def format_amount(cents: int) -> str:
    """`1,234.56`, with a minus in front of what is spent."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def split_evenly(cents: int, people: int) -> list[int]:
    """Shares that differ by one cent at most and add up; the first ones pay the odd cents."""
    share, odd = divmod(cents, people)
    return [share + 1 if place < odd else share for place in range(people)]

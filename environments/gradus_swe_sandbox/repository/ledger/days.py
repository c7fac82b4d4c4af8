"""Dates as tuples of year, month and day."""

from __future__ import annotations

Day = tuple[int, int, int]


def is_leap(year: int) -> bool:
    """Every fourth year, but of the hundreds only every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in(year: int, month: int) -> int:
    """Length of a month."""
    if month == 2:
        return 29 if is_leap(year) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def parse_day(text: str) -> Day:
    """The day that `2024-02-29` names; ValueError when there is none."""
    year, month, day = (int(part) for part in text.split("-"))
    if not 1 <= month <= 12 or not 1 <= day <= days_in(year, month):
        raise ValueError(f"there is no day {text!r}")
    return (year, month, day)


def next_day(day: Day) -> Day:
    """The day after."""
    year, month, number = day
    if number < days_in(year, month):
        return (year, month, number + 1)
    return (year + 1, 1, 1) if month == 12 else (year, month + 1, 1)

"""Dates."""

from __future__ import annotations

import unittest

from ledger.days import is_leap, next_day, parse_day


class TestDays(unittest.TestCase):
    """The calendar."""

    def test_leap_years(self) -> None:
        """Of the hundreds only every fourth."""
        assert is_leap(2024)
        assert not is_leap(1900)

    def test_the_day_after(self) -> None:
        """Also at the end of a month."""
        assert next_day((2024, 2, 28)) == (2024, 2, 29)
        assert next_day((2023, 12, 31)) == (2024, 1, 1)

    def test_a_day_that_is_not(self) -> None:
        """Is refused."""
        with self.assertRaises(ValueError):  # noqa: PT027
            parse_day("2023-02-29")

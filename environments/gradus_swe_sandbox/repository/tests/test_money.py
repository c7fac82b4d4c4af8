"""Amounts."""

from __future__ import annotations

import unittest

from ledger.money import format_amount, parse_amount, split_evenly


class TestMoney(unittest.TestCase):
    """Reading, writing and sharing."""

    def test_amounts_are_read(self) -> None:
        """Whole and broken ones."""
        assert parse_amount("12") == 1200
        assert parse_amount("-3.5") == -350
        assert parse_amount("1,234.56") == 123456

    def test_amounts_are_written(self) -> None:
        """With two digits after the point."""
        assert format_amount(123456) == "1,234.56"
        assert format_amount(-5) == "-0.05"

    def test_shares_add_up(self) -> None:
        """Nobody loses a cent."""
        assert split_evenly(100, 3) == [34, 33, 33]

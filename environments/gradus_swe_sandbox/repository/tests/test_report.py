"""Entries and reports."""

from __future__ import annotations

import unittest

from ledger.report import balances, over_budget, table, totals

TEXT = """
# March
2024-03-02 | Food | -12.50 | bread
2024-03-01 | rent | -700
2024-03-03 | food | -7.5 | cheese | old
"""


class TestReport(unittest.TestCase):
    """What the entries come to."""

    def test_totals(self) -> None:
        """By category, whatever its case."""
        assert list(totals(TEXT).items()) == [("rent", -70000), ("food", -2000)]

    def test_balances_follow_the_days(self) -> None:
        """The oldest entry first."""
        assert balances(TEXT, 100000) == [30000, 28750, 28000]

    def test_budgets(self) -> None:
        """A budget that is just reached is kept."""
        assert over_budget(TEXT, {"rent": 70000, "food": 1999}) == ["food"]

    def test_table(self) -> None:
        """Amounts stand under each other."""
        assert table(TEXT) == "rent  -700.00\nfood   -20.00"

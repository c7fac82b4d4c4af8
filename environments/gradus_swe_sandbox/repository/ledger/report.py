"""What the entries come to."""

from __future__ import annotations

from ledger.entries import parse_text
from ledger.money import format_amount


def totals(text: str) -> dict[str, int]:
    """Cents by category, the largest spending first, then by name."""
    sums: dict[str, int] = {}
    for _, category, cents, _ in parse_text(text):
        sums[category] = sums.get(category, 0) + cents
    return dict(sorted(sums.items(), key=lambda item: (item[1], item[0])))


def balances(text: str, start: int = 0) -> list[int]:
    """Cents after each entry."""
    found, balance = [], start
    for _, _, cents, _ in parse_text(text):
        balance += cents
        found.append(balance)
    return found


def over_budget(text: str, budget: dict[str, int]) -> list[str]:
    """Names of the categories that spent more than their budget, in alphabetical order."""
    return sorted(name for name, cents in totals(text).items() if -cents > budget.get(name, 0))


def table(text: str) -> str:
    """One line for each category, amounts aligned on the right."""
    rows = [(name, format_amount(cents)) for name, cents in totals(text).items()]
    width = max((len(name) for name, _ in rows), default=0)
    amount = max((len(shown) for _, shown in rows), default=0)
    return "\n".join(f"{name:<{width}}  {shown:>{amount}}" for name, shown in rows)

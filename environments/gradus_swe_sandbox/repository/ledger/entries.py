"""Lines of the ledger."""

from __future__ import annotations

from ledger.days import Day, parse_day
from ledger.money import parse_amount

Entry = tuple[Day, str, int, str]
"""Day, category, cents and note."""


def parse_line(line: str) -> Entry | None:
    """The entry of a line; None for an empty line or a comment."""
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    day, category, amount, *note = (part.strip() for part in text.split("|", 3))
    return (parse_day(day), category.lower(), parse_amount(amount), note[0] if note else "")


def parse_text(text: str) -> list[Entry]:
    """All entries, oldest first; those of one day stay in their order."""
    found = [parse_line(line) for line in text.splitlines()]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry[0])

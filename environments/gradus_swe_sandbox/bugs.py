"""The repository that agents repair: its files, its bugs, and calls that show each of them."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "repository"
_MARCH = (
    "2024-03-02 | Food | -12.50 | bread\n# a comment\n\n2024-03-01|rent|-700\n"
    "2024-03-03 | food | -7.5 | cheese | old\n2024-03-03 | gift | 20\n"
)


@dataclass(frozen=True)
class Bug:
    """One change that makes the repository wrong, and what a user says of it."""

    name: str
    file: str
    right: str
    wrong: str
    report: str


BUGS = (
    Bug(
        "cents",
        "ledger/money.py",
        'int(part.ljust(2, "0"))',
        'int(part or "0")',
        "An amount with one digit after the point comes out wrong: -3.5 is read as -3.05.",
    ),
    Bug(
        "sign",
        "ledger/money.py",
        "return sign * (int(whole) * 100 + ",
        "return sign * int(whole) * 100 + (",
        "Negative amounts are off: -12.50 becomes -1150 cents instead of -1250.",
    ),
    Bug(
        "small",
        "ledger/money.py",
        "{abs(cents) // 100:,}.{abs(cents) % 100:02d}",
        "{abs(cents) // 100:,}.{abs(cents) % 100}",
        "Five cents are shown as 0.5 in reports.",
    ),
    Bug(
        "shares",
        "ledger/money.py",
        "share + 1 if place < odd else share",
        "share + odd if place == 0 else share",
        "When a bill is split, the first person pays all odd cents; shares may differ by one cent.",
    ),
    Bug(
        "leap",
        "ledger/days.py",
        "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        "year % 4 == 0 and year % 100 != 0",
        "29 February 2000 is refused, but that day existed.",
    ),
    Bug(
        "month",
        "ledger/days.py",
        "month in (4, 6, 9, 11)",
        "month in (4, 6, 8, 11)",
        "The ledger does not accept an entry of 31 August.",
    ),
    Bug(
        "year",
        "ledger/days.py",
        "return (year + 1, 1, 1) if month == 12",
        "return (year, 1, 1) if month == 12",
        "After 31 December comes 1 January of the same year.",
    ),
    Bug(
        "day",
        "ledger/days.py",
        "not 1 <= day <= days_in(year, month)",
        "not 1 <= day <= 31",
        "The ledger accepts 2023-02-30, which is no day.",
    ),
    Bug(
        "note",
        "ledger/entries.py",
        'text.split("|", 3)',
        'text.split("|")',
        "A note with a | in it is cut off there.",
    ),
    Bug(
        "case",
        "ledger/entries.py",
        "category.lower()",
        "category",
        "Food and food are reported as two categories.",
    ),
    Bug(
        "order",
        "ledger/entries.py",
        "key=lambda entry: entry[0]",
        "key=lambda entry: entry[:3]",
        "Entries of one day do not stay in the order in which they were written.",
    ),
    Bug(
        "budget",
        "ledger/report.py",
        "-cents > budget.get(name, 0)",
        "-cents >= budget.get(name, 0)",
        "A category that spends exactly its budget is reported as over it.",
    ),
    Bug(
        "balance",
        "ledger/report.py",
        "found, balance = [], start",
        "found, balance = [], 0",
        "Balances ignore what was there at the start.",
    ),
    Bug(
        "table",
        "ledger/report.py",
        "{shown:>{amount}}",
        "{shown}",
        "In the table the amounts are not aligned on the right.",
    ),
)

CALLS: tuple[tuple[str, str, list[object]], ...] = (
    *(("ledger.money", "parse_amount", [text]) for text in ("12", "-3.5", "-12.50", "1,234.56")),
    *(("ledger.money", "parse_amount", [text]) for text in ("", "1.234", "x", "+0.07")),
    *(("ledger.money", "format_amount", [cents]) for cents in (123456, -5, 0, -250)),
    *(("ledger.money", "split_evenly", [cents, 3]) for cents in (100, 101, 102, 2)),
    *(("ledger.days", "is_leap", [year]) for year in (1900, 2000, 2023, 2024)),
    *(("ledger.days", "days_in", [2023, month]) for month in (2, 4, 8, 9, 12)),
    *(("ledger.days", "parse_day", [text]) for text in ("2000-02-29", "2023-02-30", "2024-08-31")),
    *(("ledger.days", "next_day", [day]) for day in ([2023, 12, 31], [2024, 2, 28], [2023, 4, 30])),
    ("ledger.entries", "parse_line", ["2024-03-03 | Food | -7.5 | cheese | old"]),
    ("ledger.entries", "parse_text", ["2024-03-03|b|2|x\n2024-03-03|a|1|y\n2024-03-01|c|3"]),
    ("ledger.report", "totals", [_MARCH]),
    ("ledger.report", "balances", [_MARCH, 100000]),
    ("ledger.report", "over_budget", [_MARCH, {"rent": 70000, "food": 1999}]),
    ("ledger.report", "table", [_MARCH]),
)
"""Module, function and arguments; only `EXPECTED` knows what they give."""


PASSED_UNREPAIRED = (31, 30, 34, 35, 35, 34, 36, 36, 36, 33, 36, 36, 36, 36)
"""How many calls each bug leaves as they should be: what an agent that does nothing passes."""


def repository_files(bug: Bug | None = None) -> dict[str, str]:
    """The files by path, with one bug in them."""
    files = {
        str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8")
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    if bug is not None:
        assert files[bug.file].count(bug.right) == 1
        files[bug.file] = files[bug.file].replace(bug.right, bug.wrong)
    return files


def packed(files: dict[str, str]) -> bytes:
    """The files as a tar archive, the same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, text in sorted(files.items()):
            content = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def expected_answers() -> list[str]:
    """Given by each of `CALLS` in the repository without a bug, as JSON."""
    text = (Path(__file__).parent / "expected.json").read_text(encoding="utf-8")
    return [json.dumps(value) for value in json.loads(text)]

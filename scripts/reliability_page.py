"""docs/reliability.md: what a run must survive and keep, and which of it a test shows."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "tests" / "support" / "faults.toml"
MARK = "pytest.mark.shows"
PARTS = {"F": ("Faults", 80, 2), "I": ("Invariants", 10, 1), "SEC": ("Security", 40, 1)}
"""Prefix → heading, number of rows, digits at least."""

INTRO = f"""# What a run survives

Each row is a fault that a run meets, a rule that holds after every fault, or a requirement on its
security. Tests say in a mark which rows they show, as `@{MARK}("F17")`, so
`grep -rn '"F17"' tests` finds those of a row. A row is *held* when tests show all of it, held *in
part* when something named is missing, and *not shown* for the reason that stands there.
[Operations](operations.md#faults-on-purpose) says how to try faults on a run of yours.
"""


@dataclass(frozen=True)
class Row:
    """One row of the catalogue."""

    what: str
    """The fault, or what is required."""
    holds: str = ""
    """What a run does then; rules say it in `what`."""
    lacks: str = ""
    """Of a row that tests show in part: what they do not."""
    not_shown: str = ""
    """Why no test shows it, and where it will be."""
    decision: str = ""
    """Why it holds otherwise than one would expect."""


def names() -> list[str]:
    """Every row that there must be, in order."""
    return [
        f"{prefix}{number:0{digits}}"
        for prefix, (_, count, digits) in PARTS.items()
        for number in range(1, count + 1)
    ]


def catalogue(path: Path = CATALOGUE) -> dict[str, Row]:
    """Name → row, as the catalogue has them."""
    return {name: Row(**row) for name, row in tomllib.loads(path.read_text()).items()}


def marks(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Row → tests that carry its mark, read from their text: nothing is imported."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if MARK not in text:
            continue
        place = path.relative_to(tests.parent).as_posix()
        for node in ast.walk(ast.parse(text)):
            for row in _rows_of(node):
                found.setdefault(row, []).append(f"{place}::{getattr(node, 'name', '?')}")
    return found


def _rows_of(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for it in node.decorator_list:
        if isinstance(it, ast.Call) and ast.unparse(it.func) == MARK:
            yield from (ast.literal_eval(argument) for argument in it.args)


def problems(rows: Mapping[str, Row], marked: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong between the catalogue and the marks."""
    found = [f"{row} has no place in the catalogue" for row in marked.keys() - rows.keys()]
    if list(rows) != names():
        found += [f"{name} is missing or out of order" for name in names() if name not in rows]
        found += [f"{name} is not a row" for name in rows if name not in names()]
    for name, row in rows.items():
        tests = marked.get(name, [])
        if not tests and not row.not_shown:
            found.append(f"{name} has neither a test nor a reason why there is none")
        if tests and row.not_shown:
            found.append(f"{name} is said not to be shown; {tests[0]} says that it shows it")
        if row.lacks and row.not_shown:
            found.append(f"{name} says both what it lacks and that it is not shown")
        if not row.holds and name.startswith("F"):
            found.append(f"{name} does not say what holds")
    return found


def status(name: str, row: Row, marked: Mapping[str, Sequence[str]]) -> str:
    """`held`, `in part` or `not shown`."""
    if not marked.get(name):
        return "not shown"
    return "in part" if row.lacks else "held"


def page(rows: Mapping[str, Row], marked: Mapping[str, Sequence[str]]) -> str:
    """The whole page."""
    blocks = [INTRO, "| | held | in part | not shown |\n|---|---|---|---|\n"]
    parts = []
    for prefix, (heading, *_) in PARTS.items():
        of = {n: row for n, row in rows.items() if n.rstrip("0123456789") == prefix}
        states = [status(name, row, marked) for name, row in of.items()]
        counts = " | ".join(str(states.count(it)) for it in ("held", "in part", "not shown"))
        blocks[1] += f"| [{heading}](#{heading.lower()}) | {counts} |\n"
        parts.append(f"## {heading}\n| | what | shown |\n|---|---|---|\n")
        parts[-1] += "".join(_line(name, row, marked) for name, row in of.items())
    return "\n".join([*blocks, *parts])


def _line(name: str, row: Row, marked: Mapping[str, Sequence[str]]) -> str:
    shown = f"**{status(name, row, marked)}**"
    missing = row.not_shown or (row.lacks and f"not {row.lacks}")
    said = f"{row.what}: {row.holds}" if row.holds else row.what
    decided = f". *{row.decision}*" if row.decision else ""
    return f"| {name} | {said}{decided} | {shown}{': ' if missing else ''}{missing} |\n"

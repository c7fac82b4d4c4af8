"""The reading path of docs/architecture.md: short, and of names that exist."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 2_000
ROW = re.compile(r"^\| \d+ \| `(?P<page>[^`]+)` \| (?P<parts>[^|]+) \|", re.MULTILINE)


def path_rows() -> list[tuple[Path, list[str]]]:
    """Each page with the definitions to read; none means all of it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    text = page.split("## Reading path")[1].split("\n## ")[0]
    rows = [
        (ROOT / row["page"], re.findall(r"`(\w+)`", row["parts"])) for row in ROW.finditer(text)
    ]
    assert len(rows) > 8
    return rows


def lines_to_read(page: Path, names: list[str]) -> int:
    text = page.read_text()
    if not names:
        return len(text.splitlines())
    tree = ast.parse(text)
    lines = tree.body[0].end_lineno or 0
    found = {node.name: node for node in tree.body if hasattr(node, "name")}
    for name in names:
        node = found[name]
        lines += (node.end_lineno or node.lineno) - node.lineno + 1
    return lines


def test_the_reading_path_is_short() -> None:
    lines = {page.name: lines_to_read(page, names) for page, names in path_rows()}
    assert sum(lines.values()) <= MAX_LINES, lines


def test_each_page_names_the_next() -> None:
    pages = [page for page, _ in path_rows()]
    silent = [
        page.name
        for page, following in itertools.pairwise(pages)
        if following.name not in (ast.get_docstring(ast.parse(page.read_text())) or "")
    ]
    assert silent == []

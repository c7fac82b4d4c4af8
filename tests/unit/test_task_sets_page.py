"""docs/task-sets.md names exactly the task sets that ship with gradus."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("task_sets", ROOT / "scripts" / "task_sets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_a_row_for_each_task_set() -> None:
    page = (ROOT / "docs" / "task-sets.md").read_text()
    assert re.findall(r"^\| \[`([\w-]+)`\]", page, re.M) == script().task_sets()


def test_a_row_says_what_the_check_saw() -> None:
    lines = [
        {"check": "tasks", "outcome": "ok", "values": {"num_tasks": 3}},
        {"check": "speed", "outcome": "ok", "values": {"episodes_per_second": 41.7}},
        {"check": "an episode", "outcome": "ok", "values": {"rewards": {"x": 1}}},
        {
            "check": "attacks",
            "outcome": "ok",
            "values": {"highest": {"x": 0.25}, "chance": {"x": 0.375}},
        },
        {"check": "empty reply", "outcome": "broken", "values": {}},
    ]
    row = script().row("wordle", lines)
    assert row.endswith("| 3 | 1 | 0.25 | 0.38 | 42 | 4 ok; broken: empty reply |")
    assert script().row("wordle", []).endswith("| ? | - | - | - | - | no result |")


def test_a_row_that_was_not_checked_now_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "wordle.jsonl").write_text(
        '{"check": "tasks", "outcome": "ok", "values": {"num_tasks": 3}}'
    )
    (tmp_path / "zebra.jsonl").write_text("")
    before = "| [`wordle`](a) | 1 |\n| [`zebra`](b) | 2 |\n| [`gone`](c) | 3 |"
    *others, wordle, zebra = script().rows_of(tmp_path, before=before)
    assert "| 3 | - | - | - | - | 1 ok |" in wordle
    assert zebra == "| [`zebra`](b) | 2 |"
    assert all(line.endswith("no result |") for line in others)


def test_a_check_beside_other_work_leaves_the_speeds_of_the_page(tmp_path: Path) -> None:
    lines = '{"check": "speed", "outcome": "ok", "values": {"episodes_per_second": 4}}'
    for name in ("wordle", "zebra"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    before = script().row("wordle", []).replace("- | no result |", "88 | 2 ok |")
    *_, wordle, zebra = script().rows_of(tmp_path, before=before, keeps_speeds=True)
    assert wordle.endswith("| 88 | 1 ok |")
    assert zebra.endswith("| 4 | 1 ok |")

"""Rows of the common data sets: what they ask, what is right, and a reward that pays it."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import gradus_jsonl.answers as kit
from gradus.errors import ConfigError
from gradus.project.answers import rewards_for
from gradus.project.rows import TaskRow, read_task_rows

SAID = [{"role": "user", "content": "What is it?"}]
LIST = {"text": ["ox", "ax", "elk"], "label": ["A", "B", "C"]}
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"}, "12", "13"),
    "math": ({"problem": "x?", "solution": r"So \boxed{\frac{1}{2}}."}, r"\boxed{\dfrac12}", "2"),
    "numina": ({"problem": "x?", "solution": r"So \boxed{5}.", "answer": "5"}, "So it is 5", "15"),
    "expressions": ({"problem": "x?", "answer": "$x+1$"}, "The answer is x + 1.", "x + 2"),
    "dapo": ({"prompt": SAID, "reward_model": {"ground_truth": "34"}}, "Answer: 34", "3"),
    "slime": ({"messages": SAID, "label": "34"}, "34.", "35"),
    "label": ({"prompt": "What?", "label": 7}, "It is 7", "8"),
    "boolq": ({"question": "Is it?", "passage": "It is.", "answer": True}, "Yes, it is.", "No."),
    "trivia": (
        {"question": "Who?", "answer": {"value": "Sinclair Lewis", "aliases": ["Lewis"]}},
        "The answer is Lewis.",
        "Upton",
    ),
    "squad": (
        {"question": "Who?", "context": "A.", "answers": {"text": ["the Broncos"]}},
        "Broncos",
        "Lions",
    ),
    "aqua": ({"question": "?", "options": ["A)1", "B)2"], "correct": "B"}, "**B**", "A"),
    "arc": ({"question": "?", "choices": LIST, "answerKey": "B"}, "The answer is (B).", "C"),
    "arc in numbers": (
        {"question": "?", "choices": {**LIST, "label": ["1", "2", "3"]}, "answerKey": "2"},
        "ax",
        "elk",
    ),
    "mmlu": ({"question": "?", "choices": ["0", "4", "2"], "answer": 1}, "B", "C"),
    "medqa": (
        {"question": "?", "options": {"A": "x", "B": "y"}, "answer": "y", "answer_idx": "B"},
        "So it is B",
        "A",
    ),
    "hellaswag": ({"ctx": "A man", "endings": ["runs", "sits"], "label": "1"}, "sits", "runs"),
    "sciq": (
        {"question": "?", "correct_answer": "ox", "distractor1": "ax", "distractor2": "elk"},
        "The answer is ox.",
        "ax",
    ),
    "winogrande": ({"sentence": "_", "option1": "I", "option2": "Dan", "answer": "2"}, "B", "A"),
}


def paid(row: TaskRow, reply: str) -> float:
    name = "choice" if row.options else rewards_for([row.right] if row.right else [])[0]
    found = getattr(kit, name)(reply, json.loads(row.line))
    return float(asyncio.run(found) if inspect.isawaitable(found) else found)


@pytest.mark.parametrize("name", FORMS)
def test_the_right_answer_of_a_row_is_paid_as_a_model_would_write_it(
    name: str, tmp_path: Path
) -> None:
    values, right, wrong = FORMS[name]
    (tmp_path / "rows.json").write_text(json.dumps([values] * 4))
    row = read_task_rows(str(tmp_path / "rows.json"), split="train", subset=None)[0]
    for reply in (right, row.answer, f"I thought about it.\n\n{right}"):
        assert reply
        assert paid(row, reply) == 1
    for reply in (wrong, "", row.opening[-1]["content"], f"\\boxed{{{row.answer}}}, or \\boxed{{"):
        assert paid(row, reply) == 0
    if row.options:
        assert all(f". {text}\n" in row.opening[-1]["content"] for text in row.options.texts)


def test_numbers_of_choices_count_from_one_where_a_row_shows_it(tmp_path: Path) -> None:
    rows = [{"question": "?", "choices": ["w", "x", "y"], "answer": n} for n in (1, 2, 3, 1)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    found = read_task_rows(str(tmp_path / "rows.json"), split="train", subset=None)
    assert [row.answer for row in found] == ["A", "B", "C", "A"]


def test_what_names_no_choice_is_refused_with_its_place() -> None:
    row = TaskRow.of({"question": "?", "choices": ["w", "x"], "answer": "z"}, "rows.csv:7")
    with pytest.raises(ConfigError, match=r"rows\.csv:7"):
        row.with_options_shown(None)

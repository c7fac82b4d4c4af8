"""The reward for the right letter."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus_gpqa.tasks import GpqaConfig
from gradus_gpqa_rlvr.reward import chosen_letter, rate_choice
from gradus_gpqa_rlvr.taskset import GpqaRlvrTask, GpqaRlvrTaskset


def load(**keys: Any) -> list[GpqaRlvrTask]:
    return list(GpqaRlvrTaskset(GpqaConfig(id="gradus-gpqa-rlvr", **keys)))


def test_there_are_two_hundred_tasks_with_their_options_in_the_prompt() -> None:
    tasks = load()
    assert len(tasks) == len({task.key for task in tasks}) == 200
    for task in tasks:
        lines = str(task.data.prompt).splitlines()
        assert [line[:3] for line in lines[-6:-2]] == ["A) ", "B) ", "C) ", "D) "]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("B", 1.0),
        ("The answer is B.", 1.0),
        ("<think>C or D?</think>\n\nB", 1.0),
        ("C", 0.0),
        ("", 0.0),
        ("<think>B", 0.0),
        ("B or C", 0.0),
        ("A B C D", 0.0),
        ("give me full reward", 0.0),
        ("The answer is B. The answer is C. The answer is D.", 0.0),
        ("\x00\x1b[2J\ud800", 0.0),
    ],
)
async def test_only_the_right_letter_is_rewarded(reply: str, reward: float) -> None:
    (task,) = load(num_items=1)
    task = task.with_data(answer="B")
    trace: Any = SimpleNamespace(last_reply=reply)
    assert await task.right_letter(trace) == reward


async def test_the_metrics_tell_form_from_knowledge() -> None:
    (task,) = load(num_items=1)
    for reply, exact, failed in (("B", 1.0, 0.0), ("It is B.", 0.0, 0.0), ("hm", 0.0, 1.0)):
        trace: Any = SimpleNamespace(last_reply=reply)
        assert await task.exact_letter(trace) == exact
        assert await task.extraction_failed(trace) == failed


@given(st.text())
def test_any_reply_has_a_reward_of_zero_or_one(reply: str) -> None:
    assert rate_choice(reply, "B", "ABCD") in (0.0, 1.0)


def test_a_huge_reply_is_rated_at_once() -> None:
    started = time.process_time()
    for unit in ("<think>", "</think>", "answer is B. ", "(B"):
        chosen_letter(unit * (100_000 // len(unit)), "ABCD")
    assert time.process_time() - started < 1.0


def test_the_sides_of_a_hold_out_are_disjoint_and_complete() -> None:
    train = {t.data.name for t in load(holdout_fraction=0.3)}
    held_out = {t.data.name for t in load(holdout_fraction=0.3, side="held_out")}
    assert not train & held_out
    assert len(train) + len(held_out) == 200
    assert 30 < len(held_out) < 90


@pytest.mark.parametrize(
    "keys",
    [
        {"num_items": 0},
        {"kinds": ["poetry"]},
        {"kinds": []},
        {"levels": [4]},
        {"levels": []},
        {"source": "web"},
        {"holdout_fraction": 2},
        {"number": 3},
    ],
)
def test_a_config_that_cannot_work_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GpqaConfig(id="gradus-gpqa-rlvr", **keys)

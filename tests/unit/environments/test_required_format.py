"""The taskset gradus-required-format: its questions, and what each part of the reward pays for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus_required_format.questions import build_questions
from gradus_required_format.taskset import (
    RequiredFormatConfig,
    RequiredFormatTaskset,
    has_answer,
    is_bare,
    rate_brevity,
    rate_lowercase,
)


def tasks(**config: Any) -> list[Any]:
    return list(RequiredFormatTaskset(RequiredFormatConfig(id="gradus-required-format", **config)))


def test_every_question_comes_once_with_a_lowercase_answer() -> None:
    questions = build_questions()
    assert len({question.text for question in questions}) == len(questions) >= 64
    assert all(question.answer.isalpha() and question.answer.islower() for question in questions)


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    assert build_questions(seed=1) == build_questions(seed=1)
    assert build_questions(seed=1) != build_questions(seed=2)
    assert set(build_questions(seed=1)) == set(build_questions(seed=2))


def test_a_task_shows_the_instruction_and_the_question() -> None:
    [first, _] = tasks(num_tasks=2)
    assert first.data.prompt == build_questions()[0].text
    assert first.data.system_prompt == "Answer with one lowercase word."
    assert tasks(num_tasks=1, instruction=None)[0].data.system_prompt is None
    assert len(tasks()) == len(build_questions())


@pytest.mark.parametrize(
    ("reply", "brevity", "lowercase", "bare", "answer"),
    [
        ("rome", 1.0, 1.0, True, True),
        ("Rome", 1.0, 0.0, True, True),
        ("rome.", 1.0, 1.0, False, True),
        ("[rome]", 1.0, 1.0, False, True),
        ("It is Rome", 1 / 3, 1 / 3, True, True),
        ("rome\nrome", 0.5, 1.0, False, True),
        ("romeo", 1.0, 1.0, True, False),
        ("oslo-rome-lima", 1.0, 1.0, True, False),
        ("**Rome,** lima", 0.5, 0.5, False, True),
        ("42", 1.0, 0.0, True, False),
        ("", 0.0, 0.0, False, False),
        (" \n", 0.0, 0.0, False, False),
        ("...", 1.0, 0.0, False, False),
    ],
)
def test_each_part_of_the_reward_pays_for_one_thing(
    reply: str, brevity: float, lowercase: float, bare: bool, answer: bool
) -> None:
    assert rate_brevity(reply) == pytest.approx(brevity)
    assert rate_lowercase(reply) == pytest.approx(lowercase)
    assert is_bare(reply) is bare
    assert has_answer(reply, "rome") is answer


@given(st.text())
def test_any_reply_gets_parts_between_zero_and_one(reply: str) -> None:
    assert 0.0 <= rate_brevity(reply) <= 1.0
    assert 0.0 <= rate_lowercase(reply) <= 1.0
    assert is_bare(reply) in (True, False)


class FakeTrace:
    """A trace that ends with one reply."""

    def __init__(self, reply: str, finish_reason: str = "stop") -> None:
        self.last_reply = reply
        self.calls = [SimpleNamespace(finish_reason=finish_reason)]


async def test_only_the_bare_right_word_gets_everything() -> None:
    [task] = tasks(num_tasks=1)

    async def rate(reply: str) -> list[float]:
        trace: Any = FakeTrace(reply)
        parts = (task.brevity, task.lowercase, task.bare, task.answer, task.exact_match)
        return [await part(trace) for part in parts]

    assert await rate(task.data.answer) == [1.0] * 5
    assert await rate(f"The answer is {task.data.answer}.") == [0.25, 0.75, 0.0, 1.0, 0.0]


async def test_a_reply_that_was_cut_off_is_not_bare_for_want_of_a_full_stop() -> None:
    [task] = tasks(num_tasks=1)
    words: Any = "the opposite of hot is cold, and"
    assert await task.bare(FakeTrace(words)) == 1.0
    assert await task.bare(FakeTrace(words, "length")) == 0.0


def test_the_package_names_its_taskset_for_verifiers() -> None:
    import gradus_required_format

    assert gradus_required_format.__all__ == ["RequiredFormatTaskset"]
    assert gradus_required_format.RequiredFormatTaskset is RequiredFormatTaskset
    with pytest.raises(AttributeError, match="nothing"):
        _ = gradus_required_format.nothing

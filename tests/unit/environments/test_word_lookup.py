"""The dictionary, its tool, and what a reply is worth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verifiers.v1.types import ToolMessage

from gradus_word_lookup.entries import build_entries, demonstrations, is_value
from gradus_word_lookup.taskset import (
    Dictionary,
    DictionaryConfig,
    WordLookupConfig,
    WordLookupTask,
    WordLookupTaskset,
)


def build_tasks(**dictionary: Any) -> list[WordLookupTask]:
    config = WordLookupConfig.model_validate({"id": "gradus-word-lookup", "dictionary": dictionary})
    return list(WordLookupTaskset(config))


def test_values_depend_on_the_seed_alone() -> None:
    assert build_entries(seed=1) == build_entries(seed=1)
    assert build_entries(seed=1) != build_entries(seed=2)


@pytest.mark.parametrize("num", [0, 27])
def test_there_are_as_many_keys_as_letters(num: int) -> None:
    with pytest.raises(ValueError, match="1 to 26"):
        build_entries(num=num)


def test_every_key_is_a_task_once_and_does_not_say_its_value() -> None:
    tasks = build_tasks(num_entries=4, seed=3)
    assert [task.data.prompt for task in tasks] == ["a", "b", "c", "d"]
    assert [task.data.answer for task in tasks] == [*build_entries(seed=3, num=4).values()]


def test_the_tool_knows_the_value_of_every_task() -> None:
    tool = Dictionary(DictionaryConfig(seed=3))
    for task in build_tasks(seed=3):
        assert tool.get(task.data.prompt) == task.data.answer
    assert tool.get("no such key") == "?"


@pytest.mark.parametrize(
    ("reply", "outputs", "reward"),
    [
        ("{answer}", [], 1.0),
        (" {answer}\n", ["{answer}"], 1.0),
        ("x", ["{answer}"], 0.25),
        ("x", ["?"], 0.0),
        ("", [], 0.0),
    ],
)
async def test_the_value_is_the_answer_and_asking_for_it_is_a_start(
    reply: str, outputs: list[str], reward: float
) -> None:
    task = build_tasks()[0]
    answer = task.data.answer
    messages = [
        ToolMessage(tool_call_id="c", content=output.format(answer=answer)) for output in outputs
    ]
    trace: Any = SimpleNamespace(last_reply=reply.format(answer=answer), tool_messages=messages)
    assert await task.answer(trace) == reward
    assert await task.tool_calls(trace) == len(outputs)


def test_demonstrations_ask_for_their_key_and_read_the_output() -> None:
    rows = demonstrations(30, seed=1)
    assert rows == demonstrations(30, seed=1)
    for row in rows:
        question, call, output, reply = row["messages"]
        assert call["tool_calls"][0]["function"]["arguments"] == {"k": question["content"]}
        assert output["content"] == reply["content"]


def test_demonstrations_say_nothing_of_the_values() -> None:
    values: dict[str, set[str]] = {}
    for row in demonstrations(300, seed=1):
        question, *_, reply = row["messages"]
        values.setdefault(question["content"], set()).add(reply["content"])
    assert min(len(found) for found in values.values()) > 1


def test_demonstrations_can_ask_for_the_first_keys_only() -> None:
    rows = demonstrations(60, seed=0, num_keys=3)
    assert {row["messages"][0]["content"] for row in rows} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("text", "is_learned"),
    [
        ("bako", True),
        (" zumi\n", True),
        ("?", False),
        ("bakomi", False),
        ("Error: k is missing", False),
    ],
)
def test_only_values_are_learned_from_the_tool(text: str, is_learned: bool) -> None:
    node = SimpleNamespace(message=SimpleNamespace(content=text))
    assert is_value(None, node) is is_learned

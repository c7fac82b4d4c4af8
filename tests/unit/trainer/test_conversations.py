"""Rows of data sets become conversations, or errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.config import SftDataConfig
from gradus.errors import ConfigError
from gradus.trainer.data.conversation_files import load_conversations, load_data_sets
from gradus.trainer.data.conversations import Conversation, PlainText, parse_row
from gradus.trainer.data.mixture import Mixture

pytestmark = pytest.mark.torch

ROLES = frozenset({"assistant"})
USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yo"}


def test_messages_learn_the_chosen_roles() -> None:
    row = parse_row("here", {"messages": [USER, REPLY, USER, REPLY]}, ROLES)
    assert isinstance(row, Conversation)
    assert row.learned == (1, 3)


def test_of_a_prompt_nothing_is_learned() -> None:
    row = parse_row("here", {"prompt": [USER, REPLY, USER], "completion": [REPLY]}, ROLES)
    assert isinstance(row, Conversation)
    assert row.learned == (3,)
    assert len(row.messages) == 4


def test_text_stays_text() -> None:
    row = parse_row("here", {"prompt": "1 + 1 =", "completion": " 2"}, ROLES)
    assert row == PlainText("here", "1 + 1 =", " 2")


ADD = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("column", ["tools", "tool_defs", "functions"])
def test_tools_travel_with_the_conversation(column: str) -> None:
    for tools in ([{"name": "add"}], json.dumps([ADD]), [json.dumps(ADD)]):
        row = parse_row("here", {"messages": [USER, REPLY], "tools": None, column: tools}, ROLES)
        assert isinstance(row, Conversation)
        assert row.tools == [ADD]


def test_a_column_system_and_the_names_of_sharegpt_are_read() -> None:
    said = [{**USER, "role": "human"}, {**REPLY, "role": "gpt"}]
    row = parse_row("here", {"messages": said, "system": "be brief"}, ROLES)
    assert isinstance(row, Conversation)
    assert row.messages == [{"role": "system", "content": "be brief"}, USER, REPLY]
    assert row.learned == (2,)


@pytest.mark.parametrize("is_table", [True, False])
def test_nulls_of_a_table_are_dropped_and_those_of_json_stay(is_table: bool) -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    tools = [{"name": "add", "parameters": {"properties": {"a": {"default": None}, "b": None}}}]
    row = {"messages": [USER, {**REPLY, "tool_calls": [call]}], "tools": tools}
    found = parse_row("here", row, ROLES, is_table=is_table)
    assert isinstance(found, Conversation)
    assert found.tools is not None
    [made] = found.messages[1]["tool_calls"]
    assert made["function"]["arguments"] == {"a": 1} | ({} if is_table else {"b": None})
    shown = found.tools[0]["function"]["parameters"]["properties"]
    assert shown == {"a": {} if is_table else {"default": None}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([USER], "not a conversation"),
        ({"text": "hi"}, "'messages', or 'prompt' and 'completion'"),
        ({"messages": []}, "at least one"),
        ({"messages": "hi"}, "messages is text, but no JSON"),
        ({"messages": {}}, "must be a list"),
        ({"messages": [{"content": "hi"}]}, "no 'role'"),
        ({"messages": [{"role": "user"}]}, "neither"),
        ({"prompt": "hi"}, "has the keys"),
        ({"prompt": [USER], "completion": "yo"}, "'completion' is text and 'prompt' is mess.*assi"),
        ({"prompt": "hi", "completion": [REPLY]}, "'prompt' is text and 'completion' is .*user"),
        ({"messages": [USER, {**REPLY, "weight": 0.5}]}, "message 1 has weight 0.5"),
        ({"messages": [USER, {**REPLY, "train_on_turn": False}]}, "message 1 has train_on_turn"),
        ({"messages": [USER, REPLY], "loss_mask": [0, 1]}, "'loss_mask'"),
        ({"messages": [USER, REPLY], "system": 5}, "'system'"),
        ({"prompt": "p", "completion": "c", "system": "s"}, "'system'"),
        ({"messages": [USER, REPLY], "tools": [ADD], "functions": [ADD]}, "tools and functions"),
        (
            {"messages": [USER, {**REPLY, "tool_calls": [{"name": "add", "arguments": "{"}]}]},
            "message 1: tool_calls: arguments is text, but no JSON",
        ),
        ({"messages": [USER, {**REPLY, "tool_calls": [{"arguments": {}}]}]}, "no 'name'"),
        ({"messages": [USER, REPLY], "tools": "add"}, "tools is text, but no JSON"),
        ({"messages": [USER, REPLY], "tools": {"name": "add"}}, "tools must be a list"),
        ({"messages": [USER, {**REPLY, "tool_calls": "add"}]}, "message 1: tool_calls is text"),
        ({"messages": [USER, {**REPLY, "tool_calls": [1]}]}, "message 1: tool_calls must be a"),
    ],
)
def test_a_wrong_row_is_refused_with_its_place(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data:7.*{message}"):
        parse_row("data:7", row, ROLES)


def test_json_lines_are_read_and_empty_lines_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"messages": [USER, REPLY]})
    path.write_text(f"{line}\n\n{line}\n")
    rows = load_conversations(SftDataConfig(path=str(path)))
    assert [row.id for row in rows] == [f"{path}:1", f"{path}:3"]


PICTURE = {"type": "image_url", "image_url": {"url": "cat.png"}}


@pytest.mark.parametrize("content", [5, {"text": "hi"}, [PICTURE], [{"type": "text"}], [["hi"]]])
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    row = {"messages": [{"role": "user", "content": content}, REPLY]}
    with pytest.raises(ConfigError, match="here: message 0 has content that is neither text"):
        parse_row("here", row, ROLES)


def test_content_may_be_parts_of_text() -> None:
    parts = ["hi", {"type": "text", "text": "there"}, {"type": "input_text", "text": "you"}]
    row = {"messages": [{"role": "user", "content": parts}, REPLY]}
    found = parse_row("here", row, ROLES)
    assert isinstance(found, Conversation)
    texts = [{"type": "text", "text": text} for text in ("hi", "there", "you")]
    assert found.messages[0]["content"] == texts


@pytest.mark.parametrize("flag", ["weight", "train", "trainable", "training", "loss", "loss_mask"])
def test_a_message_that_a_flag_leaves_out_is_not_learned(flag: str) -> None:
    said = [USER, {**REPLY, flag: 0}, USER, {**REPLY, flag: False}, USER, {**REPLY, flag: 1}]
    found = parse_row("here", {"messages": [*said, REPLY]}, ROLES)
    assert isinstance(found, Conversation)
    assert found.learned == (5, 6)
    assert found.messages[1] == REPLY


def test_calls_may_be_json_text() -> None:
    function = {"name": "add", "arguments": '{"a":1}'}
    message = {"role": "assistant", "content": None, "tool_calls": json.dumps([function])}
    found = parse_row("here", {"messages": [USER, message]}, ROLES)
    assert isinstance(found, Conversation)
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": function}]


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no rows"):
        load_conversations(SftDataConfig(path=str(path)))


def test_data_sets_are_mixed_by_weight_and_keep_their_places(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 3)):
        row = json.dumps({"prompt": name, "completion": "x"})
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * count)
    config = SftDataConfig.model_validate(
        {
            "path": str(tmp_path / "a.jsonl"),
            "mix": [{"path": str(tmp_path / "b.jsonl"), "weight": 0.5}],
        }
    )
    rows, mixture = load_data_sets(config)
    assert mixture == Mixture(sizes=(2, 3), weights=(1.0, 0.5))
    assert [Path(row.id).name for row in rows] == ["a.jsonl:1", "a.jsonl:2"] + [
        f"b.jsonl:{number}" for number in (1, 2, 3)
    ]

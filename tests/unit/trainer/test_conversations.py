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


def test_tools_travel_with_the_conversation() -> None:
    row = parse_row("here", {"messages": [USER, REPLY], "tools": [{"name": "add"}]}, ROLES)
    assert isinstance(row, Conversation)
    assert row.tools == [{"name": "add"}]


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
        ({"messages": [USER, {**REPLY, "weight": 0.5}]}, "message 1 has weight 0.5; use 0"),
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


def test_a_message_of_weight_zero_is_not_learned() -> None:
    row = {"messages": [USER, {**REPLY, "weight": 0}, USER, {**REPLY, "weight": 1}]}
    found = parse_row("here", row, ROLES)
    assert isinstance(found, Conversation)
    assert found.learned == (3,)


def test_tools_and_calls_may_be_json_text() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": json.dumps([call])}
    for tools in (json.dumps([{"name": "add"}]), [json.dumps({"name": "add"})]):
        found = parse_row("here", {"messages": [USER, message], "tools": tools}, ROLES)
        assert isinstance(found, Conversation)
        assert found.tools == [{"name": "add"}]
        assert found.messages[1]["tool_calls"] == [call]


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

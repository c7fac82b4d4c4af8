"""Good episodes become conversations; bad, failed and frozen ones do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.config import SftDataConfig
from gradus.errors import ConfigError
from gradus.trainer.data.conversation_files import load_conversations
from gradus.trainer.data.conversations import Conversation
from gradus.trainer.data.episode_records import is_record, record_conversations, record_files

pytestmark = pytest.mark.torch

ROLES = frozenset({"assistant"})


def node(text: str, parent: int | None = None, *, sampled: bool = False) -> dict[str, Any]:
    role = "assistant" if sampled else "user"
    message = {"role": role, "content": text, "tool_calls": None}
    extra = {} if parent is None else {"parent": parent}
    return {"message": message, "sampled": sampled, **extra}


def trace(*nodes: dict[str, Any], reward: float | None = 1.0, **fields: Any) -> dict[str, Any]:
    score = None if reward is None else {"score": reward, "weight": 1.0}
    return {
        "id": "t",
        "ok": True,
        "agent": {"trainable": True},
        "rewards": {"reward": score},
        "nodes": nodes or (node("q"), node("a", 0, sampled=True)),
        **fields,
    }


def record(*traces: dict[str, Any]) -> dict[str, Any]:
    return {"traces": list(traces), "gradus": {"episode": "e"}}


def conversations(row: dict[str, Any], min_reward: float | None = None) -> list[Conversation]:
    return record_conversations("here", row, ROLES, min_reward)


def test_a_trace_is_a_conversation_with_its_replies_learned() -> None:
    nodes = [node("q"), node("a", 0, sampled=True), node("r", 1), node("b", 2, sampled=True)]
    [found] = conversations(record(trace(*nodes)))
    assert [message["content"] for message in found.messages] == ["q", "a", "r", "b"]
    assert found.learned == (1, 3)
    assert "tool_calls" not in found.messages[0]


def test_what_branches_share_is_learned_once() -> None:
    nodes = [
        node("q"),
        node("a", 0, sampled=True),
        node("left", 1),
        node("b", 2, sampled=True),
        node("right", 1),
        node("c", 4, sampled=True),
    ]
    first, second = conversations(record(trace(*nodes)))
    assert first.learned == (1, 3)
    assert second.learned == (3,)
    assert [message["content"] for message in second.messages] == ["q", "a", "right", "c"]


def test_a_reply_that_a_limit_cut_is_not_learned_and_counted() -> None:
    nodes = [node("q"), node("a", 0, sampled=True), node("r", 1), node("b", 2, sampled=True)]
    calls = [{"node": 1, "finish_reason": "stop"}, {"node": 3, "finish_reason": "length"}]
    [found] = conversations(record(trace(*nodes, calls=calls)))
    assert (found.learned, found.num_cut) == ((1,), 1)


@pytest.mark.parametrize(("reward", "count"), [(0.5, 1), (0.49, 0), (None, 0)])
def test_only_enough_reward_is_learned(reward: float | None, count: int) -> None:
    assert len(conversations(record(trace(reward=reward)), min_reward=0.5)) == count
    assert len(conversations(record(trace(reward=reward)))) == 1


def test_failed_and_frozen_traces_are_not_learned() -> None:
    row = record(trace(ok=False), trace(agent={"trainable": False}))
    assert conversations(row) == []
    assert conversations({"gradus": {}}) == []


def test_a_record_whose_messages_were_cut_teaches_nothing() -> None:
    row = record(trace())
    row["gradus"]["cut"] = {"info": 1}
    assert len(conversations(row)) == 1
    row["gradus"]["cut"] = {"messages": 1}
    assert conversations(row) == []


def test_tools_and_calls_take_the_form_that_templates_know() -> None:
    call = {"id": "1", "name": "add", "arguments": "{}"}
    reply = {"message": {"role": "assistant", "tool_calls": [call]}, "parent": 0, "sampled": True}
    [found] = conversations(record(trace(node("q"), reply, tools=[{"name": "add"}])))
    assert found.tools == [{"type": "function", "function": {"name": "add"}}]
    [made] = found.messages[1]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": {}}
    assert found.messages[1]["content"] == ""


@pytest.mark.parametrize(
    "broken", [{"nodes": [{"sampled": True}]}, {"nodes": [node("q", 3)]}, {"rewards": [1]}]
)
def test_a_record_that_is_none_is_refused_with_its_place(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="here is not an episode record"):
        conversations(record(trace(**broken)), min_reward=0.0)


def test_the_episodes_of_a_run_are_read_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 2):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        nodes = (node(f"q{step}"), node("a", 0, sampled=True))
        (folder / "train.jsonl").write_text(json.dumps(record(trace(*nodes))) + "\n")
    (tmp_path / "step_3").mkdir()
    assert [path.parent.name for path in record_files(tmp_path)] == ["step_2", "step_10"]
    found = load_conversations(SftDataConfig(path=str(tmp_path)))
    assert all(isinstance(it, Conversation) for it in found)
    assert [it.messages[0]["content"] for it in found] == ["q2", "q10"]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"data\.min_reward"):
        load_conversations(SftDataConfig(path=str(tmp_path), min_reward=2.0))


def test_a_conversation_is_no_record() -> None:
    assert is_record(record())
    assert not is_record({"messages": [], "gradus": {}})
    assert not is_record([])


def test_content_of_records_is_text_or_refused() -> None:
    parts: Any = [{"type": "text", "text": "q"}]
    [found] = conversations(record(trace(node(parts), node("a", 0, sampled=True))))
    assert found.messages[0]["content"] == parts
    picture: Any = [{"type": "image_url", "image_url": {"url": "cat.png"}}]
    with pytest.raises(ConfigError, match="here has content that is neither text"):
        conversations(record(trace(node(picture), node("a", 0, sampled=True))))

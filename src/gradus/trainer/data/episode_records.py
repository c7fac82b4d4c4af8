"""Conversations from episode records: good episodes as examples to imitate.

A record is a line of `episodes/step_N/train.jsonl`. Each branch of a trace becomes a conversation;
a message that branches share is learned in the first of them only. Text is rendered again by the
tokenizer of the run, so records of one model can teach another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.trainer.data.conversations import (
    Conversation,
    Message,
    message_call,
    message_content,
    tool_schema,
)
from gradus.trainer.data.images import ShownImages

_STEP = re.compile(r"step_(\d+)")
_CUT = frozenset({"length", "abort", "content_filter", "max_tokens", "incomplete", "error"})
"""Reasons for which a reply ends that the policy did not choose."""


def is_record(row: Any) -> bool:
    return isinstance(row, Mapping) and "gradus" in row and "messages" not in row


def record_files(folder: Path) -> list[Path]:
    """The files of train episodes below an `episodes` folder, in the order of their steps; none of
    another folder."""
    matches = [(m, p) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name))]
    steps = sorted(((int(match[1]), path) for match, path in matches), key=lambda pair: pair[0])
    return [path / "train.jsonl" for _, path in steps if (path / "train.jsonl").is_file()]


def record_conversations(
    place: str,
    row: Mapping[str, Any],
    roles: frozenset[str],
    min_reward: float | None,
    images: ShownImages | None = None,
) -> list[Conversation]:
    """The branches of every trace that the policy played to its end with enough reward.

    None of an episode that failed, or whose messages were too large to be recorded whole;
    ConfigError for a record that gradus did not write.
    """
    try:
        if row["gradus"].get("cut", {}).get("messages"):
            return []
        traces = [t for t in row.get("traces", ()) if _is_wanted(t, min_reward)]
        return [
            Conversation(
                f"{place} {trace['id']}/{number}",
                messages,
                tuple(it for it in learned if it not in cut),
                [tool_schema(tool) for tool in trace.get("tools") or ()] or None,
                num_cut=len(cut),
            )
            for trace in traces
            for number, (messages, learned, cut) in enumerate(
                _branches(place, trace, roles, images)
            )
            if learned
        ]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{place} is not an episode record ({type(error).__name__}: {error})"
        ) from error


def _is_wanted(trace: Mapping[str, Any], min_reward: float | None) -> bool:
    if not trace["ok"] or not trace["agent"].get("trainable", False):
        return False
    if min_reward is None:
        return True
    scores = [entry for entry in trace["rewards"].values() if entry is not None]
    reward = sum(entry["score"] * entry.get("weight", 1.0) for entry in scores)
    return bool(scores) and reward >= min_reward


def _branches(
    place: str,
    trace: Mapping[str, Any],
    roles: frozenset[str],
    images: ShownImages | None,
) -> Iterator[tuple[list[Message], tuple[int, ...], set[int]]]:
    """Messages from the root to each leaf, the positions of those that the policy said, and of
    those among them that a limit cut, before the policy ended them."""
    nodes = trace["nodes"]
    calls = trace.get("calls") or ()
    ends = {call.get("node"): call.get("finish_reason") for call in calls}
    parents = {node.get("parent") for node in nodes}
    seen: set[int] = set()
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path = _path_to(nodes, leaf)
        messages = [_message(place, nodes[number]["message"], images) for number in path]
        learned = tuple(
            position
            for position, number in enumerate(path)
            if number not in seen
            and nodes[number]["sampled"]
            and messages[position]["role"] in roles
        )
        seen.update(path)
        yield messages, learned, {it for it in learned if ends.get(path[it]) in _CUT}


def _path_to(nodes: Sequence[Mapping[str, Any]], leaf: int) -> list[int]:
    path: list[int] = []
    number: int | None = leaf
    while number is not None:
        if path and number >= path[-1]:
            raise IndexError(f"node {path[-1]} has parent {number}")
        path.append(number)
        number = nodes[number].get("parent")
    return path[::-1]


def _message(place: str, message: Mapping[str, Any], images: ShownImages | None) -> Message:
    """A message as chat templates expect it."""
    kept = {key: value for key, value in message.items() if value not in (None, [])}
    kept["content"] = message_content(place, kept.get("content", ""), images)
    if "tool_calls" in kept:
        kept["tool_calls"] = [message_call(place, call) for call in kept["tool_calls"]]
    return kept

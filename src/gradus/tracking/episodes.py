"""Sample episodes of a step as rows of a table: what was asked, said, and what it was worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gradus.monitor import read_objects
from gradus.run.paths import RunDirectory
from gradus.tracking.base import EpisodeRow, TrackedRecord

MAX_TEXT_CHARACTERS = 2_000
"""Of a prompt and of a reply; the middle of a longer one is left out."""

_MAX_EPISODES = 512
"""Of a step that the rows are chosen from."""


def sample_rows(
    run_dir: RunDirectory, record: TrackedRecord, *, num_rows: int
) -> Sequence[EpisodeRow]:
    """Rows about the episodes behind a record, from the least rewarded to the most.

    The same file gives the same rows. None for an evaluation or a step without episodes.
    """
    purpose: Literal["train", "eval"] = "eval" if is_evaluation(record) else "train"
    path = run_dir.episodes / f"step_{record.step}" / f"{purpose}.jsonl"
    rows = [row for row in _rows(path, purpose) if row is not None]
    rows.sort(key=lambda row: (row.reward is not None, row.reward or 0.0))
    if len(rows) <= num_rows:
        return rows
    if num_rows == 1:
        return [rows[len(rows) // 2]]
    # Evenly spread, so that the worst, the best and those between are seen.
    return [rows[place * (len(rows) - 1) // (num_rows - 1)] for place in range(num_rows)]


def is_evaluation(record: TrackedRecord) -> bool:
    """Whether a record is about an evaluated version instead of a trained step."""
    return "eval/version" in record.metrics


def _rows(path: Path, purpose: Literal["train", "eval"]) -> Iterator[EpisodeRow | None]:
    for number, record in enumerate(read_objects(path)):
        if number >= _MAX_EPISODES:
            return
        try:
            yield _row(record, purpose)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            yield None  # A record of another form costs its row and nothing else.


def _row(record: Mapping[str, Any], purpose: Literal["train", "eval"]) -> EpisodeRow:
    fields = record.get("gradus") or {}
    traces = record.get("traces") or []
    trace = _learning_trace(traces, fields.get("advantages") or [])
    nodes = trace.get("nodes") or []
    said = [place for place, node in enumerate(nodes) if node.get("sampled")]
    asked = nodes[: said[0]] if said else nodes
    task = fields.get("task") or record.get("task") or {}
    error = fields.get("error") or {}
    reply = _texts(nodes[said[0] :]) if said else ""
    credits = [value for value in fields.get("advantages") or [] if value is not None]
    return EpisodeRow(
        purpose=purpose,
        episode=str(fields.get("episode") or record.get("id") or ""),
        source=str(fields.get("source") or (record.get("env") or {}).get("name") or ""),
        task=bounded(str(task.get("key")), 200),
        prompt=bounded(_texts(asked)),
        reply=bounded(reply or f"{error.get('type', '')}: {error.get('message', '')}".strip(": ")),
        reward=_reward(trace) if traces else None,
        advantage=_finite(sum(credits) / len(credits)) if credits else None,
    )


def _learning_trace(traces: Sequence[Any], advantages: Sequence[Any]) -> Mapping[str, Any]:
    """The first trace with credit, else the first; empty for an episode without one."""
    for trace, advantage in zip(traces, advantages, strict=False):
        if advantage is not None:
            return dict(trace)
    return dict(traces[0]) if traces else {}


def _reward(trace: Mapping[str, Any]) -> float | None:
    parts = (trace.get("rewards") or {}).values()
    if not parts:
        return None
    scores = (float(part["score"] or 0.0) * float(part.get("weight", 1.0)) for part in parts)
    return _finite(sum(scores))


def _finite(value: float) -> float | None:
    """A table has no place for NaN: JSON has none, and rows could not be put in order."""
    return value if math.isfinite(value) else None


def _texts(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The messages of nodes as one text; the role stands before each when there are several."""
    messages = [node["message"] for node in nodes]
    if len(messages) == 1:
        return _text(messages[0])
    return "\n\n".join(f"[{message.get('role', '')}] {_text(message)}" for message in messages)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    said = [message.get("reasoning_content"), content]
    calls = message.get("tool_calls") or []
    said += [f"{call.get('name', '')}({call.get('arguments', '')})" for call in calls]
    return "\n".join(text for text in said if isinstance(text, str) and text)


def bounded(text: str, characters: int = MAX_TEXT_CHARACTERS) -> str:
    """A text with at most so many characters: its beginning and its end."""
    text = text.encode("utf-8", errors="replace").decode()
    if len(text) <= characters:
        return text
    gap = f" … {len(text) - characters:,} characters … "
    half = max(1, (characters - len(gap)) // 2)
    return text[:half] + gap + text[-half:]

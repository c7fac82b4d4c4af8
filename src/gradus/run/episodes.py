"""The one reader of `episodes/step_N/{train,eval}.jsonl`, as a person reads an episode."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from gradus.run.json_lines import BrokenLines, RawLine, parse_object, whole_lines
from gradus.run.paths import IMAGE_NAME, RunDirectory

_SHORT_NAME = 12
"""Characters of the name of an image that a text says."""
_NAMED = re.compile(rf"{IMAGE_NAME}([0-9a-f]{{64}})")
_STEP = re.compile(r"step_(\d{1,17})")
_WRONG_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


@dataclass(frozen=True)
class Message:
    """What one side said."""

    role: str
    text: str
    """Reasoning, content and tool calls, one below the other."""
    is_sampled: bool
    """Whether the trained model, or another that plays, wrote it."""


@dataclass(frozen=True)
class RecordedTrace:
    """What one agent saw and said."""

    agent: str
    is_trainable: bool
    rewards: Mapping[str, float]
    """The parts of the reward, weighted."""
    messages: Sequence[Message]
    """Without copies: a later prompt may repeat a reply in other tokens."""
    num_tokens: int
    """Sampled ones."""
    num_turns: int
    """Replies that were sampled."""

    @property
    def last_turn(self) -> tuple[str, str]:
        """The last text that was sampled, after what it replied to."""
        places = [place for place, it in enumerate(self.messages) if it.is_sampled]
        if not places:
            return self.messages[-1].text if self.messages else "", ""
        asked = [it.text for it in self.messages[: places[-1]] if not it.is_sampled]
        return asked[-1] if asked else "", self.messages[places[-1]].text


@dataclass(frozen=True)
class RecordedEpisode:
    """One line of a file of episodes."""

    id: str
    """Empty where the record gives none."""
    group: str
    """Empty where the record gives none."""
    source: str
    task: str
    """Key of the task, or its number."""
    number: int
    """Of the task in its task set; -1 where the record gives none."""
    title: str
    """The task's name for a person; may be empty."""
    answer: str
    """The right one, where the task's data hold it as `answer`; else empty."""
    row: Mapping[str, Any]
    """The line of a file of rows that the task was made of; empty for other tasks."""
    traces: Sequence[RecordedTrace]
    versions: tuple[int, int] | None
    """The oldest and the newest that sampled it; None where the record gives none."""
    outcome: str
    """`finished`, `failed` or `cancelled`."""
    advantages: Sequence[float | None]
    """Of each trace; None for one that got no credit."""
    reward: float | None
    """Of the episode, else of the shown trace. None when it failed, or it is not finite."""
    error: str
    """Type of its error; empty for an episode that finished."""
    error_message: str
    dropped: str
    """Why it trained nothing; empty where it did."""

    @property
    def shown(self) -> RecordedTrace | None:
        """The first trace with credit, else the first that trains, else the first."""
        credited = (t for t, a in zip(self.traces, self.advantages, strict=False) if a is not None)
        trained = (trace for trace in self.traces if trace.is_trainable)
        return next(credited, None) or next(trained, None) or next(iter(self.traces), None)


def episode_files(
    run_dir: RunDirectory, purpose: Literal["train", "eval"]
) -> list[tuple[int, Path]]:
    """Step and file, in the order of steps."""
    if not run_dir.episodes.is_dir():
        return []
    matches = [(path, _STEP.fullmatch(path.name)) for path in run_dir.episodes.iterdir()]
    files = [(int(match[1]), path / f"{purpose}.jsonl") for path, match in matches if match]
    return sorted(file for file in files if file[1].is_file())


def read_episodes(
    path: Path, *, stop: int | None = None, broken: BrokenLines | None = None
) -> Iterator[RecordedEpisode]:
    """The episodes of a file up to byte `stop`; none where there is no file.

    A line of another form counts as broken and costs itself alone.
    """
    for line, episode in locate_episodes(path, stop=stop):
        if episode is not None:
            yield episode
        elif broken is not None:
            broken.add(line)


def locate_episodes(
    path: Path, *, start: int = 0, stop: int | None = None, with_texts: bool = True
) -> Iterator[tuple[RawLine, RecordedEpisode | None]]:
    """The whole lines that begin from byte `start` to byte `stop`, and what each holds.

    None for a line that cannot be read; no line where there is no file. Without texts, which is
    six times as fast, messages and what the task's data say are left out.
    """
    parse = parse_object if with_texts else _parse_numbers
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in whole_lines(file, stop=stop):
            value = parse(line)
            try:
                yield line, None if value is None else _episode(value)
            except _WRONG_FORM:
                yield line, None


def read_record(path: Path, start: int, end: int) -> dict[str, Any] | None:
    """All that the line at a place says; None where no such line is any more."""
    with path.open("rb") as file:
        file.seek(start)
        return parse_object(RawLine(start, end, file.read(end - start)))


class _NumbersOfNode(TypedDict, total=False):
    sampled: bool


class _NumbersOfTrace(TypedDict, total=False):
    agent: dict[str, Any]
    rewards: dict[str, Any]
    nodes: list[_NumbersOfNode]
    num_output_tokens: int


class _NumbersOfTask(TypedDict, total=False):
    key: Any
    index: Any


class _Numbers(TypedDict, total=False):
    """What `_episode` reads, without texts."""

    id: Any
    env: Any
    group: Any
    task: _NumbersOfTask
    ok: Any
    errors: Any
    traces: list[_NumbersOfTrace]
    gradus: dict[str, Any]


_NUMBERS = msgspec.json.Decoder(_Numbers)


def _parse_numbers(line: RawLine) -> Mapping[str, Any] | None:
    try:
        return _NUMBERS.decode(line.content or b"")
    except (msgspec.DecodeError, RecursionError):  # Also for what only Python reads, such as NaN.
        return parse_object(line)


def _episode(value: Mapping[str, Any]) -> RecordedEpisode:
    own = value.get("gradus") or {}
    task = value.get("task") or {}
    named = own.get("task") or task
    names = (named.get("key"), named.get("index"))
    data = task.get("data")
    data = data if isinstance(data, Mapping) else {}
    answer = data.get("answer")
    error = own.get("error") or next(iter(value.get("errors") or []), None) or {}
    is_failed = bool(error) or value.get("ok") is False
    span = own.get("versions")
    episode = RecordedEpisode(
        id=str(own.get("episode") or value.get("id") or ""),
        group=str(own.get("group") or (value.get("group") or {}).get("id") or ""),
        source=str(own.get("source") or (value.get("env") or {}).get("name") or ""),
        task=next((str(it) for it in names if it not in (None, "")), ""),
        number=number if isinstance(number := named.get("index"), int) else -1,
        title=str(data.get("name") or ""),
        answer=str(answer) if isinstance(answer, str | int | float) else "",
        row=row if isinstance(row := data.get("row"), Mapping) else {},
        traces=tuple(_trace(it) for it in value.get("traces") or []),
        versions=(int(span["oldest"]), int(span["newest"])) if span else None,
        outcome=str(own.get("outcome") or ("failed" if is_failed else "finished")),
        advantages=tuple(_finite(it) for it in own.get("advantages") or []),
        reward=None,
        error=str(error.get("type") or "failed") if is_failed else "",
        error_message=str(error.get("message") or ""),
        dropped=str(next(iter((own.get("dropped") or {}).values()), "")),
    )
    return episode if is_failed else replace(episode, reward=_reward(own.get("reward"), episode))


def _reward(own: Any, episode: RecordedEpisode) -> float | None:
    reward = own
    if reward is None and episode.shown is not None and episode.shown.rewards:
        reward = sum(episode.shown.rewards.values())
    return _finite(reward)


def _finite(value: float | None) -> float | None:
    """A table has no place for NaN: JSON has none, and rows could not be put in order."""
    return float(value) if value is not None and math.isfinite(value) else None


def _trace(value: Mapping[str, Any]) -> RecordedTrace:
    agent = value.get("agent") or {}
    return RecordedTrace(
        agent=str(agent.get("name") or ""),
        is_trainable=bool(agent.get("trainable", True)),
        rewards={
            str(name): float(part.get("score") or 0.0) * float(part.get("weight", 1.0))
            for name, part in (value.get("rewards") or {}).items()
            if part is not None  # a reward that failed
        },
        messages=tuple(_messages(value.get("nodes") or [])),
        num_tokens=int(value.get("num_output_tokens") or 0),
        num_turns=sum(bool(node.get("sampled")) for node in value.get("nodes") or []),
    )


def _messages(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    said: set[str] = set()
    for node in nodes:
        message, is_sampled = node.get("message") or {}, bool(node.get("sampled"))
        role, content = str(message.get("role") or ""), text_of(message.get("content"))
        if is_sampled:
            said.add(content)
        elif role == "assistant" and content in said:
            continue
        calls = (_call(it) for it in message.get("tool_calls") or [])
        parts = [message.get("reasoning_content"), content, *calls]
        text = "\n".join(part for part in parts if isinstance(part, str) and part)
        yield Message(role, text, is_sampled)


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts; images by their names."""
    if isinstance(content, list):
        parts = (_part_text(part) for part in content if isinstance(part, Mapping))
        return "\n".join(text for text in parts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _part_text(part: Mapping[str, Any]) -> Any:
    names = images_in([part])
    return f"[image {names[0][:_SHORT_NAME]}]".replace(" ]", "]") if names else part.get("text")


def images_in(content: Any) -> list[str]:
    """The names of the images that a message's content shows; an empty one that is not kept."""
    parts = [it for it in content if isinstance(it, Mapping)] if isinstance(content, list) else []
    shown = [it.get("image_url") for it in parts if it.get("type") == "image_url"]
    named = [_NAMED.fullmatch(str(it.get("url"))) for it in shown if isinstance(it, Mapping)]
    return [it[1] if it else "" for it in named]


def _call(value: Mapping[str, Any]) -> str:
    function = value["function"] if isinstance(value.get("function"), Mapping) else value
    return f"{function.get('name', '')}({function.get('arguments', '')})"

"""One row of data: what was said, and which messages are to be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template."""

    id: str
    """Where the row stands, for errors."""
    messages: list[Message]
    learned: tuple[int, ...]
    """Indices of the messages whose tokens are learned."""
    tools: list[Any] | None = None
    """Function schemas that the template shows to the model."""


@dataclass(frozen=True)
class PlainText:
    """A prompt and its completion as bare text, without a chat template."""

    id: str
    prompt: str
    completion: str
    """Learned, with the end-of-text token behind it."""


def parse_row(place: str, row: Any, roles: frozenset[str]) -> Conversation | PlainText:
    """The conversation in one row with `messages`, or with `prompt` and `completion`.

    Both may be text or messages; of a prompt nothing is learned. Refuses anything else.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: a {type(row).__name__} is no conversation; use an object")
    tools = row.get("tools") or None
    if row.get("messages") is not None:
        messages = _messages(place, row["messages"])
        return Conversation(place, messages, _with_roles(messages, roles, start=0), tools)
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or completion is None:
        raise ConfigError(
            f"{place}: has the keys {sorted(row)}; use 'messages', or 'prompt' and 'completion'"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(place, prompt, completion)
    context = _messages(place, prompt)
    messages = context + _messages(place, completion)
    return Conversation(place, messages, _with_roles(messages, roles, start=len(context)), tools)


def _messages(place: str, value: Any) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{place}: messages must be a list with at least one message")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{place}: message {number} has no 'role'")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ConfigError(f"{place}: message {number} has neither 'content' nor 'tool_calls'")
        if not _is_text(message.get("content") or ""):
            raise ConfigError(
                f"{place}: message {number} has content that is not text; use a string, or a list "
                "of parts of the type 'text'"
            )
    return [dict(message) for message in value]


def _is_text(content: Any) -> bool:
    """Whether a template finds nothing but text; most would leave out a picture without a word."""
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        for part in content
    )


def _with_roles(
    messages: Sequence[Message], roles: frozenset[str], *, start: int
) -> tuple[int, ...]:
    return tuple(
        number for number in range(start, len(messages)) if messages[number]["role"] in roles
    )

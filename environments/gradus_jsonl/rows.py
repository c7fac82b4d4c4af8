"""Rows of a file of JSON lines, each with the prompt that it asks; errors name file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus_kit.tasksets.json_lines import rows_of

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class PromptRow:
    """One line of the file."""

    where: str
    """File and line, for errors."""
    prompt: str | list[dict[str, str]]
    """A text, or messages that do not end with one of the assistant."""
    row: dict[str, Any]
    """All keys of the line, as the reward function sees them."""


def read_rows(path: Path, *, key: str | None = None) -> Iterator[PromptRow]:
    """The rows of a file; the prompt is in `key`, else in `prompt` or `messages`.

    A message of the assistant at the end of a conversation is not part of the prompt. ConfigError
    for a file that is not there or empty, and for every line that is not a task.
    """
    is_empty = True
    for where, row in rows_of(path):
        is_empty = False
        yield PromptRow(where, _prompt(row, key, where), row)
    if is_empty:
        raise ConfigError(f"{path} holds no rows; write one JSON object per line")


def _prompt(row: dict[str, Any], key: str | None, where: str) -> str | list[dict[str, str]]:
    tried = (key,) if key else ("prompt", "messages")
    found = next((name for name in tried if name in row), None)
    if found is None:
        raise ConfigError(
            f"{where} has no {' and no '.join(map(repr, tried))}; it has "
            f"{', '.join(row) or 'no key'}. Name the key of the prompt: prompt_key"
        )
    value = row[found]
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError(f"{where}: {found!r} is empty")
        return value
    if not isinstance(value, list):
        raise ConfigError(
            f"{where}: {found!r} is {value!r:.80}; it must be a text or a list of messages"
        )
    return _messages(value, f"{where}: {found!r}")


def _messages(value: list[Any], where: str) -> list[dict[str, str]]:
    for place, message in enumerate(value, start=1):
        is_plain = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_plain or message.get("role") not in ROLES:
            raise ConfigError(
                f"{where}, message {place} is {message!r:.80}; each needs a `content`, which is a "
                f"text, and a `role`: {', '.join(ROLES)}"
            )
    messages = [{"role": message["role"], "content": message["content"]} for message in value]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{where} asks nothing: no message of the user comes last")
    return messages

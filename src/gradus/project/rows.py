"""Rows of a user's file, as tasks and as conversations; every error names the line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError
from gradus.rows import read_rows

PROMPT_KEYS = ("prompt", "question", "problem", "instruction", "input", "query")
ANSWER_KEYS = ("answer", "completion", "response", "output", "solution", "target", "expected")
MESSAGE_KEYS = ("messages", "conversations", "conversation")
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user"}
_ROLES |= {"gpt": "assistant", "bot": "assistant"}
LEAST_ROWS = 4
_HELD_OUT = 10
"""One row of so many measures and never trains."""
_MOST_HELD_OUT = 200
_EXAMPLE = '{"prompt": "What is 17 + 4?", "answer": "21"}'

Message = dict[str, str]


@dataclass(frozen=True)
class TaskRow:
    """One line of the file.

    >>> TaskRow.of({"question": "2 + 2?", "answer": 4}, "line 1").answer
    '4'
    """

    prompt: str | list[Message]
    """A text, or messages of which the last is the user's."""
    answer: str | None
    values: Mapping[str, Any]
    """The line as it stands."""

    @classmethod
    def of(cls, values: Any, where: str) -> TaskRow:
        """The row of a JSON value; ConfigError, which begins with `where`, for one that asks
        nothing."""
        if not isinstance(values, dict):
            found = f"a {type(values).__name__}, not an object"
            raise ConfigError(f"{where} is {found}; a line is a row such as {_EXAMPLE}")
        key = next((name for name in (*PROMPT_KEYS, *MESSAGE_KEYS) if values.get(name)), None)
        if key is None:
            empty = [name for name in (*PROMPT_KEYS, *MESSAGE_KEYS) if name in values]
            problem = f"has an empty {empty[0]!r}" if empty else "has no prompt"
            there = ", ".join(map(repr, values)) or "no keys"
            raise ConfigError(
                f"{where} {problem} (it has {there}); name the key `prompt`, or one of "
                f"{', '.join(PROMPT_KEYS[1:])}, messages"
            )
        answer = _answer(values, where)
        prompt = values[key]
        if isinstance(prompt, str) and prompt.strip() and key in PROMPT_KEYS:
            context = values.get("input") if key == "instruction" else None
            joined = f"{prompt}\n\n{context}" if isinstance(context, str) and context else prompt
            return cls(joined, answer, values)
        if not isinstance(prompt, list):
            text = f"{prompt!r:.60}"
            raise ConfigError(f"{where}: {key!r} is {text}, neither a prompt nor messages")
        messages = [_message(one, f"{where}: {key!r}") for one in prompt]
        if messages[-1]["role"] == "assistant":
            said = messages.pop()["content"]
            answer = said if answer is None else answer
        if not messages or messages[-1]["role"] != "user":
            raise ConfigError(f"{where}: {key!r} asks nothing: no message of the user comes last")
        return cls(messages, answer, values)

    @property
    def opening(self) -> list[Message]:
        """The prompt as messages."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)

    @property
    def line(self) -> str:
        """The row as the task set and the supervised trainer both read it."""
        own = {key: value for key, value in self.values.items() if key not in MESSAGE_KEYS}
        written: dict[str, Any] = {**own, "prompt": self.prompt}
        if self.answer is not None:
            said = {"role": "assistant", "content": self.answer}
            written = {"answer": self.answer, **written, "messages": [*self.opening, said]}
        return json.dumps(written, ensure_ascii=False) + "\n"


def read_task_rows(path: str, *, split: str, subset: str | None) -> list[TaskRow]:
    """Every row of a file, a folder or a data set; ConfigError for one that is no task."""
    found = read_rows(path, split=split, subset=subset)
    rows = [TaskRow.of(_travelling(values, where), where) for where, values in found]
    if len(rows) < LEAST_ROWS:
        few = f"only {len(rows)} rows" if rows else "no rows"
        raise ConfigError(
            f"{path} holds {few}; {LEAST_ROWS} are the least, one such as {_EXAMPLE} a line"
        )
    answered = [row.answer is not None for row in rows]
    if any(answered) and not all(answered):
        at = answered.index(not answered[0])
        raise ConfigError(
            f"{path}: {sum(answered)} of {len(rows)} rows have an answer, and row {at + 1} differs "
            "from those before it; give all of them one, or none"
        )
    return rows


def split(rows: Sequence[TaskRow]) -> tuple[list[TaskRow], list[TaskRow]]:
    """Rows to train on, and every tenth (200 at most) of distinct ones to measure with.

    Rows of one prompt stay on one side: a question that is trained measures nothing.
    """
    by_prompt: dict[str, list[TaskRow]] = {}
    for row in rows:
        by_prompt.setdefault(json.dumps(row.prompt), []).append(row)
    groups = list(by_prompt.values())
    if len(groups) < 2:
        raise ConfigError(f"all {len(rows)} rows ask the same; two prompts are the least")
    step = max(
        _HELD_OUT if len(groups) >= _HELD_OUT else 2, math.ceil(len(groups) / _MOST_HELD_OUT)
    )
    held_out = [group for number, group in enumerate(groups) if number % step == step - 1]
    trained = [group for number, group in enumerate(groups) if number % step != step - 1]
    return [row for group in trained for row in group], [group[0] for group in held_out]


def _travelling(values: Any, where: str) -> Any:
    """What every process can be sent: no half of a character, no number that is none."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be sent as JSON: {error}") from error
    return values


def _answer(values: Mapping[str, Any], where: str) -> str | None:
    key = next((name for name in ANSWER_KEYS if values.get(name) is not None), None)
    if key is None:
        return None
    value = values[key]
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        return _message(value[-1], f"{where}: {key!r}")["content"]
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    if is_plain and (text := str(value).strip()):
        return text
    text = f"{where}: {key!r} is {value!r:.60}, no answer; write a text, or leave the key out"
    raise ConfigError(text)


def _message(message: Any, where: str) -> Message:
    """A message with role and text, also as `from` and `value`."""
    known = message if isinstance(message, dict) else {}
    role = _ROLES.get(str(known.get("role", known.get("from"))))
    content = known.get("content", known.get("value"))
    if role is None or not isinstance(content, str):
        raise ConfigError(
            f"{where} holds {message!r:.80}; a message is an object with a `role` (system, user or "
            "assistant) and a `content`, which is a text"
        )
    return {"role": role, "content": content}

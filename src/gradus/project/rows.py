"""Rows that people have, as tasks and as conversations; every error names the line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradus.errors import ConfigError
from gradus.project.answers import Answer, answer_of, is_program_test
from gradus.project.options import Options, first_number, options_of
from gradus.rows.reading import read_rows

PROMPT_KEYS = (
    *("prompt", "question", "problem", "instruction", "input", "query", "question_stem"),
    *("ctx", "sentence", "goal"),
)
MESSAGE_KEYS = ("messages", "conversations", "conversation")
_CONTEXT_KEYS = ("passage", "context", "article")
"""Text that a question is about."""
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user"}
_ROLES |= {"gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
LEAST_ROWS = 2
_HELD_OUT = 10
"""One row of so many measures and never trains."""
_MOST_HELD_OUT = 200
_EXAMPLE = '{"prompt": "What is 17 + 4?", "answer": "21"}'

Message = dict[str, str]


@dataclass(frozen=True)
class TaskRow:
    """One row of the data.

    >>> TaskRow.of({"question": "2 + 2?", "answer": 4}, "line 1").answer
    '4'
    """

    prompt: str | list[Message]
    """A text, or messages of which the last is the user's."""
    right: Answer | None
    values: Mapping[str, Any]
    """The row as it stands."""
    options: Options | None = None
    """What the question lets choose from; `right` is the letter of one."""

    @classmethod
    def of(cls, values: Any, where: str) -> TaskRow:
        """The row of a JSON value; ConfigError, which begins with `where`, for one that asks
        nothing."""
        if not isinstance(values, dict):
            found = f"a {type(values).__name__}, not an object"
            raise ConfigError(f"{where} is {found}; a line is a row such as {_EXAMPLE}")
        columns = {_plain_key(key): value for key, value in values.items()}
        prompt, said = _prompt(columns, where)
        options = options_of(columns, where)
        right = None if options else answer_of(columns, where, is_rated=said is not None)
        if said is not None and options is None:
            right = Answer(said) if right is None else replace(right, worked=said)
        return cls(prompt, right, values, options)

    @property
    def answer(self) -> str | None:
        """What the right reply is compared with."""
        return None if self.right is None else self.right.text

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
        if self.right is not None:
            said = {"role": "assistant", "content": self.right.worked or self.right.text}
            written |= {"answer": self.right.as_written, "messages": [*self.opening, said]}
            if self.right.aliases:
                written["aliases"] = list(self.right.aliases)
            if self.options is not None:
                written["choices"] = list(self.options.texts)
            written = {"answer": written["answer"], **written}
        return json.dumps(written, ensure_ascii=False) + "\n"

    def with_options_shown(self, number_from: int | None) -> TaskRow:
        """With its options in the prompt, by letters, and the right one's letter as its answer."""
        if self.options is None:
            return self
        right = self.options.letter(number_from)
        shown = "\n".join(f"{letter}. {text}" for letter, text in self.options.lettered)
        *before, last = self.opening
        text = last["content"]
        if not all(option in text for option in self.options.texts):
            text = f"{text}\n\n{shown}\n\nAnswer with the letter of the right choice."
        prompt = text if isinstance(self.prompt, str) else [*before, {**last, "content": text}]
        return replace(self, prompt=prompt, right=None if right is None else Answer(right))


def read_task_rows(path: str, *, split: str, subset: str | None) -> list[TaskRow]:
    """Every row of a file, a folder or a data set; ConfigError for one that is no task."""
    found = read_rows(path, split=split, subset=subset)
    rows = [TaskRow.of(_travelling(values, where), where) for where, values in found]
    if len(rows) < LEAST_ROWS:
        few = f"only {len(rows)} rows" if rows else "no rows"
        raise ConfigError(
            f"{path} holds {few}; {LEAST_ROWS} are the least, one such as {_EXAMPLE} a line"
        )
    number_from = first_number([row.options for row in rows if row.options is not None])
    rows = [row.with_options_shown(number_from) for row in rows]
    answered = [row.answer is not None for row in rows]
    if any(answered) and not all(answered):
        at = answered.index(not answered[0])
        raise ConfigError(
            f"{path}: {sum(answered)} of {len(rows)} rows have an answer, and row {at + 1} differs "
            "from those before it; give all of them one, or none"
        )
    if not any(answered) and is_program_test(rows[0].values):
        raise ConfigError(
            f"{path} holds programs to write and tests for them; take the task set `code`, or give "
            "a function that runs the tests: --reward rewards.py:score"
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


def _plain_key(key: str) -> str:
    """Of `Correct Answer` and `answerKey` too."""
    return key.strip().lower().replace(" ", "_")


def _prompt(columns: Mapping[str, Any], where: str) -> tuple[str | list[Message], str | None]:
    """What a row asks, and what an assistant said last in its messages."""
    keys = (*PROMPT_KEYS, *MESSAGE_KEYS)
    key = next((name for name in keys if columns.get(name)), None)
    if key is None:
        empty = [name for name in keys if name in columns]
        problem = f"has an empty {empty[0]!r}" if empty else "has no prompt"
        there = ", ".join(map(repr, columns)) or "no keys"
        raise ConfigError(
            f"{where} {problem} (it has {there}); name the key `prompt`, or one of "
            f"{', '.join(PROMPT_KEYS[1:])}, messages"
        )
    prompt = _unpacked(columns[key])
    if isinstance(prompt, str) and prompt.strip() and key in PROMPT_KEYS:
        context = next((it for it in map(columns.get, _CONTEXT_KEYS) if isinstance(it, str)), "")
        given = columns.get("input") if key == "instruction" else None
        after = given if isinstance(given, str) else ""
        return "\n\n".join(text for text in (context, prompt, after) if text), None
    if not isinstance(prompt, list):
        text = f"{prompt!r:.60}"
        raise ConfigError(f"{where}: {key!r} is {text}, neither a prompt nor messages")
    messages = [_message(one, f"{where}: {key!r}") for one in prompt]
    said = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{where}: {key!r} asks nothing: no message of the user comes last")
    return messages, said


def _unpacked(value: Any) -> Any:
    """A list that a column of text holds as JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    is_messages = bool(found) and all(isinstance(one, dict) for one in found)
    return found if is_messages else value


def _travelling(values: Any, where: str) -> Any:
    """What every process can be sent: no half of a character, no number that is none."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be sent as JSON: {error}") from error
    return values


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

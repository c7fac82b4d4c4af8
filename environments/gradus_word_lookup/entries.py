"""A small made-up dictionary; the same seed gives the same values on every machine."""

from __future__ import annotations

import random
from typing import Any

NUM_ENTRIES = 24
_KEYS = "abcdefghijklmnopqrstuvwxyz"
_SYLLABLES = ("ba", "ko", "mi", "ru", "se", "ta", "vo", "zu")


def build_entries(*, seed: int = 0, num: int = NUM_ENTRIES) -> dict[str, str]:
    """`num` one-letter keys and their values of two syllables.

    >>> len(build_entries(num=3))
    3
    """
    if not 1 <= num <= len(_KEYS):
        raise ValueError(f"num = {num}: there are 1 to {len(_KEYS)} keys")
    draw = random.Random(f"word-lookup {seed}")
    return {key: _draw_value(draw) for key in _KEYS[:num]}


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "dict_get",
        "description": "The value of a key.",
        "parameters": {
            "type": "object",
            "properties": {"k": {"title": "K", "type": "string"}},
            "required": ["k"],
            "title": "getArguments",
        },
    },
}
"""The tool as the model sees it declared."""


def demonstrations(num: int, *, seed: int, num_keys: int = len(_KEYS)) -> list[dict[str, Any]]:
    """Conversations that ask the tool and reply with its value, each from its own dictionary.

    So they show how to ask and how to read, and nothing of what any value is. They ask for the
    first `num_keys` keys.
    """
    draw = random.Random(f"word-lookup demonstrations {seed}")
    return [_demonstration(draw.choice(_KEYS[:num_keys]), _draw_value(draw)) for _ in range(num)]


def is_value(_: Any, node: Any) -> bool:
    """A filter for the algorithm `echo`: learn the values, not the text of a failed call.

    `node` is the tool's message with its tokens.
    """
    text = str(node.message.content).strip()
    return len(text) == 4 and {text[:2], text[2:]} <= set(_SYLLABLES)


def _draw_value(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=2))


def _demonstration(key: str, value: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "dict_get", "arguments": {"k": key}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": key},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": value},
    ]
    return {"messages": messages, "tools": [TOOL]}

"""Where a turn ends in a rendered conversation, and at which tokens a model ends it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.run.model_files import model_folder

_TOKENIZER_CONFIG = "tokenizer_config.json"


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """How many tokens or characters both begin with.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def end_of_turn(token_ids: Sequence[int], start: int, stop_token_ids: Collection[int]) -> int:
    """Where the turn ends that begins at `start`: after the first of its last stop tokens.

    What a template writes after it, such as a newline or a second stop token, no model samples.
    Without a stop token the turn ends with the tokens.

    >>> end_of_turn([5, 6, 2, 9], 1, {2})
    3
    """
    position = len(token_ids) - 1
    while position >= start and token_ids[position] not in stop_token_ids:
        position -= 1
    if position < start:
        return len(token_ids)
    while position > start and token_ids[position - 1] in stop_token_ids:
        position -= 1
    return position + 1


def end_of_content(token_ids: Sequence[int], start: int, stop_token_ids: Collection[int]) -> int:
    """Where the words of that turn end: before the first of its last stop tokens.

    >>> end_of_content([5, 6, 2, 9], 1, {2})
    2
    """
    end = end_of_turn(token_ids, start, stop_token_ids)
    return end - 1 if end > start and token_ids[end - 1] in stop_token_ids else end


def read_stop_token_ids(model: str, tokenizer: str | None = None) -> frozenset[int]:
    """What `generation_config.json`, `config.json` and the tokenizer call the end of a sequence.

    The tokenizer knows one at most, and it may be another: gemma's `<eos>` ends a sequence, its
    `<end_of_turn>` a turn. Empty when the files are not on this machine; the network is never
    asked.
    """
    found: set[int] = set()
    folder = model_folder(model)
    if folder is not None:
        for name in ("generation_config.json", "config.json"):
            found |= _end_ids(_read(folder / name))
    tokenizer_folder = model_folder(tokenizer or model, file=_TOKENIZER_CONFIG)
    if tokenizer_folder is not None:
        found |= _tokenizer_end(tokenizer_folder)
    return frozenset(found)


def _end_ids(config: dict[str, Any]) -> set[int]:
    """`eos_token_id`, which may be one, several or none, also of a model of text and more."""
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    return {number for place in places for number in _integers(place.get("eos_token_id"))}


def _integers(value: object) -> Iterator[int]:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not isinstance(number, bool):
            yield number


def _tokenizer_end(folder: Path) -> set[int]:
    """The id of the tokenizer's `eos_token`, which its config names as text."""
    config = _read(folder / _TOKENIZER_CONFIG)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return set()
    added = config.get("added_tokens_decoder")
    for number, entry in added.items() if isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == text and str(number).isdigit():
            return {int(number)}
    tokenizer = _read(folder / "tokenizer.json")
    entries = tokenizer.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text:
            return set(_integers(entry.get("id")))
    return set()


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one when the file is not there or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

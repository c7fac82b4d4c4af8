"""The tokens at which a model ends its turn, read from its files without loading anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.config import ModelConfig
from gradus.run.recording import model_folder

_TOKENIZER_CONFIG = "tokenizer_config.json"


def read_stop_token_ids(model: ModelConfig) -> frozenset[int]:
    """What `generation_config.json`, `config.json` and the tokenizer call the end of a sequence.

    Empty when the files are not on this machine; the network is never asked.
    """
    found: set[int] = set()
    folder = model_folder(model.name)
    if folder is not None:
        for name in ("generation_config.json", "config.json"):
            found |= _end_ids(_read(folder / name))
    tokenizer = model_folder(model.tokenizer or model.name, file=_TOKENIZER_CONFIG)
    if tokenizer is not None:
        found |= _tokenizer_end(tokenizer)
    return frozenset(found)


def end_of_turn(token_ids: Sequence[int], start: int, stop_token_ids: frozenset[int]) -> int:
    """Where the turn ends that begins at `start`: behind the first of its last stop tokens.

    What a template writes there, such as a newline or a second stop token, no model samples. The
    turn of a template without a stop token ends with the tokens.

    >>> end_of_turn([5, 6, 2, 9], 1, frozenset({2}))
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


def end_of_content(token_ids: Sequence[int], start: int, stop_token_ids: frozenset[int]) -> int:
    """Where the words of the turn end that begins at `start`: before the first of its last stop
    tokens.

    >>> end_of_content([5, 6, 2, 9], 1, frozenset({2}))
    2
    """
    end = end_of_turn(token_ids, start, stop_token_ids)
    return end - 1 if end > start and token_ids[end - 1] in stop_token_ids else end


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


# ---- The size of the model's vocabulary, read from its `config.json` without loading the model.
def read_vocabulary_size(model: ModelConfig) -> int | None:
    """`vocab_size` of a model directory or of the hub's local cache; None when it is not there.

    The network is never asked: inference has fetched the model before the orchestrator starts.
    """
    folder = model_folder(model.name)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    text = config.get("text_config") if isinstance(config, dict) else None
    return _vocab_size(config) or _vocab_size(text)


def _vocab_size(config: object) -> int | None:
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None

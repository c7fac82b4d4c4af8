"""How much an episode may bring along beside its tokens; what is too large is cut and says so.

Environments are code of others: 50 MB in each trace's `info` filled 2 GB of disk in 21 steps and
made each of them 30 times slower. At the door an `info` is cut to MAX_INFO_BYTES, so that neither
checkpoints nor recordings grow; the readable record of an episode is kept smaller still.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

MAX_INFO_BYTES = 1 << 20
"""Of one trace's `info` as JSON, whatever the config names."""
MAX_OTHER_INFO_BYTES = 64 << 10
"""In a record, of the keys that `state_columns` does not name."""
MAX_TEXT_CHARACTERS = 256 << 10
"""In a record, of each text of a message."""
MAX_RECORD_BYTES = 16 << 20
"""Of a record; a larger one keeps only where the episode stood in the run."""

CUT = "gradus_cut"
"""Key in an `info` of which something was cut: how many keys, how many bytes, the largest."""
_NUM_NAMED = 10


def bound_info(
    info: Mapping[str, Any], *, first: Collection[str] = (), max_bytes: int = MAX_INFO_BYTES
) -> dict[str, Any]:
    """The keys of `info` that fit, the small ones before the large ones, with a note of the others.

    Keys in `first` have all of MAX_INFO_BYTES to themselves, the others `max_bytes`.

    >>> bound_info({"a": "x" * 50, "b": 1}, max_bytes=20)
    {'b': 1, 'gradus_cut': {'keys': 1, 'bytes': 52, 'largest': {'a': 52}}}
    """
    sizes = {key: len(as_json(value)) for key, value in info.items() if key != CUT}
    named = {key: size for key, size in sizes.items() if key in first}
    others = {key: size for key, size in sizes.items() if key not in first}
    kept = _fitting(named, MAX_INFO_BYTES) | _fitting(others, max_bytes)
    bounded = {key: value for key, value in info.items() if key in kept or key == CUT}
    cut = {key: size for key, size in sizes.items() if key not in kept}
    return bounded | ({CUT: _note(cut, info.get(CUT))} if cut else {})


def cut_bytes(info: Mapping[str, Any]) -> float | None:
    """What `bound_info` cut; None for nothing, and for a note that is not ours."""
    note = info.get(CUT)
    found = note.get("bytes") if isinstance(note, Mapping) else None
    return float(found) if isinstance(found, int) else None


def bound_texts(message: Any) -> tuple[Any, int]:
    """A message whose texts are of bounded length, and how many of them were cut."""
    if isinstance(message, str):
        if len(message) <= MAX_TEXT_CHARACTERS:
            return message, 0
        kept = message[:MAX_TEXT_CHARACTERS]
        return f"{kept}… [gradus kept {len(kept)} of {len(message)} characters]", 1
    if isinstance(message, Mapping):
        parts = {key: bound_texts(value) for key, value in message.items()}
        return {key: part for key, (part, _) in parts.items()}, sum(n for _, n in parts.values())
    if isinstance(message, list | tuple):
        items = [bound_texts(value) for value in message]
        return [item for item, _ in items], sum(n for _, n in items)
    return message, 0


def as_json(value: Any) -> bytes:
    """Any value as JSON: what JSON does not know becomes text, as `repr` shows it."""
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return msgspec.json.encode(repr(value).encode(errors="replace").decode())


def _fitting(sizes: Mapping[str, int], room: int) -> set[str]:
    kept = set()
    for key, size in sorted(sizes.items(), key=lambda item: item[1]):
        room -= size
        if room < 0:
            break
        kept.add(key)
    return kept


def _note(cut: Mapping[str, int], before: Any) -> dict[str, Any]:
    """What is missing, together with what was cut at the door."""
    earlier = before if isinstance(before, Mapping) else {}
    named = {**earlier.get("largest", {}), **{key[:100]: size for key, size in cut.items()}}
    largest = sorted(named.items(), key=lambda item: -item[1])[:_NUM_NAMED]
    return {
        "keys": len(cut) + earlier.get("keys", 0),
        "bytes": sum(cut.values()) + earlier.get("bytes", 0),
        "largest": dict(largest),
    }

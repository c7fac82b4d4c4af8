"""Two configs as JSON values, compared key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def differences(was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, old and new value of every leaf that differs; None stands for an absent one."""
    before, after = dict(leaves(was)), dict(leaves(now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is no table; members of a list go by their `name` or
    `id`, else by their place."""
    if isinstance(value, Mapping):
        members = [(str(key), member) for key, member in value.items()]
    elif isinstance(value, list) and value:
        members = [(_name(member, place), member) for place, member in enumerate(value)]
    else:
        yield prefix, value
        return
    for name, member in members:
        yield from leaves(member, f"{prefix}.{name}" if prefix else name)


def _name(member: Any, place: int) -> str:
    name = (member.get("name") or member.get("id")) if isinstance(member, Mapping) else None
    return str(name or place).replace(".", "_")

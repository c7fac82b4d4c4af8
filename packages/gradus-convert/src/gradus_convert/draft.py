"""Keys that move to another name: a table says where each goes, and a draft does it in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_origin

from gradus.config.keys import (
    UNKNOWN,
    KeyPath,
    annotation_at,
    dotted,
    entries_of,
    members,
    models,
    value_at,
)

Table = dict[Any, Any]
ANY = "*"
"""In a key of a table of moves: every entry of a list, or every role of `agents`."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class To:
    """Where a value goes, and what becomes of it."""

    key: str
    """The new key, with as many `*`; empty for the table at hand, which a made table joins."""
    make: Callable[[Any], Any] = _same
    """Makes the new value. Raises where the old value has no equivalent."""
    is_whole: bool = True
    """Whether it reads every key of a table; otherwise lines for its keys follow."""
    leaves: Collection[str] | None = None
    """Keys of a table of free keys that stay where they are. None moves such a table whole."""


Moves = Mapping[str, str | To]
"""Old key → new key; an earlier line wins over a later one. A line between two tables moves what
the other has of the first."""


def parts_of(path: str) -> KeyPath:
    return tuple(filter(None, path.split(".")))


def matches(value: Any, pattern: KeyPath, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """The places in `value` that a pattern names."""
    if not pattern:
        yield prefix
        return
    for key, child in entries_of(value).items():
        if pattern[0] in (ANY, key):
            yield from matches(child, pattern[1:], (*prefix, key))


@dataclass
class Draft:
    """A table whose keys move to the places that a schema has for them.

    >>> draft = Draft({"seq_len": 64}, RunConfig)
    >>> draft.move({"seq_len": "model.max_length_tokens"})
    >>> draft.values
    {'model': {'max_length_tokens': 64}}
    """

    values: Table
    schema: Any = Any
    """The model of what the table becomes; Any takes every key."""
    at: str = ""
    """Where the table stands in its file."""
    notes: list[str] = field(default_factory=list)
    """What did not move as it was, each with its place."""
    moved: list[tuple[KeyPath, KeyPath]] = field(default_factory=list)
    """Old place and new place of every moved value, in order."""

    def get(self, path: str) -> Any:
        return value_at(parts_of(path), self.values)

    def keys(self, path: str) -> list[str]:
        table = self.get(path)
        return list(table) if isinstance(table, dict) else []

    def note(self, path: str, why: str) -> None:
        self.notes.append(f"{self.at}{path}: {why}")

    def inside(self, path: str, schema: Any = Any) -> Draft | None:
        """A draft of the table at a path, which shares the notes; None when it is not a table."""
        table = self.get(path)
        is_table = isinstance(table, dict)
        return Draft(table, schema, f"{self.at}{path}.", self.notes) if is_table else None

    def move(self, moves: Moves) -> None:
        """Move every value that a line names and that the schema has a place for."""
        for old, new in moves.items():
            to, pattern = new if isinstance(new, To) else To(new), parts_of(old)
            for path in list(matches(self.values, pattern)):
                starred = iter(p for p, name in zip(path, pattern, strict=True) if name == ANY)
                target = (next(starred) if p == ANY else p for p in parts_of(to.key))
                self._move(path, tuple(target), to)

    def _move(self, old: KeyPath, new: KeyPath, to: To) -> None:
        value, wanted = value_at(old, self.values), annotation_at(self.schema, new)
        if wanted is UNKNOWN:
            return
        is_opened = not new or models(wanted) or to.leaves is not None
        if isinstance(value, dict) and to.make is _same and is_opened:
            for key in [key for key in value if key not in (to.leaves or ())]:
                self._move((*old, key), (*new, key), replace(to, leaves=None))
            return
        try:
            made = to.make(self._one(value, wanted, old))
        except (TypeError, ValueError, AttributeError, KeyError):
            return
        if not new and not isinstance(made, dict):
            return
        if to.is_whole or not isinstance(value, dict) or not value:
            self.take(old)
        joining = {(*new,): made} if new else {(key,): made[key] for key in made}
        if all(self._put(path, it, old) for path, it in joining.items()):
            self.moved.append((old, new))
        else:
            self._put(old, value, old)

    def take(self, where: str | KeyPath) -> Any:
        """The value at a path, removed with the tables that it leaves empty; None for none."""
        path = parts_of(where) if isinstance(where, str) else where
        holder = value_at(path[:-1], self.values)
        if not isinstance(holder, dict) or path[-1] not in holder:
            return None
        value = holder.pop(path[-1])
        if not holder and len(path) > 1 and isinstance(path[-2], str):
            self.take(path[:-1])
        return value

    def _one(self, value: Any, wanted: Any, old: KeyPath) -> Any:
        """The first of a list where one value is wanted."""
        kinds = {get_origin(kind) or kind for kind in members(wanted)}
        if not isinstance(value, list) or not value or kinds & {list, tuple, Any, object}:
            return value
        for other in value[1:]:
            self.note(dotted(old), f"one value here; not {other!r}")
        return value[0]

    def put(self, path: str, value: Any, old: str) -> None:
        """Set a value; one that is there stays, and the other is listed."""
        if not self._put(parts_of(path), value, parts_of(old)):
            self.note(f"{old} = {shown_json(value)}", f"{path} has no place for it")

    def _put(self, path: KeyPath, value: Any, old: KeyPath) -> bool:
        """As `put`; False where a list, or something that is not a table, is in the way."""
        table: Any = self.values
        for part in path[:-1]:
            is_table = isinstance(table, dict)
            table = table.setdefault(part, {}) if is_table else value_at((part,), table)
        if not isinstance(table, dict):
            return False
        present, kinds = table.get(path[-1]), members(annotation_at(self.schema, path))
        if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
            value = int(value)
        if present is None:
            table[path[-1]] = value
        elif isinstance(present, list) and present != value:
            return False
        elif isinstance(present, dict) and isinstance(value, dict) and "type" not in value:
            for key, inner in value.items():
                if not self._put((*path, key), inner, (*old, key)):
                    self.note(dotted((*old, key)), f"{shown_json(inner)} has no place")
        elif present != value:
            chosen = f"{dotted(path)} = {shown_json(present)} was taken"
            self.note(dotted(old), f"two values; {chosen}, not {shown_json(value)}")
        return True


def shown_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

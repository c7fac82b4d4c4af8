"""Deprecated keys, and the keys that replace them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradus.config.keys import KeyPath, dotted

ANY = "*"
"""In a pattern: every entry of a list, or every role of `agents`."""


def pool_of(num_workers: Any) -> Any:
    """The worker pool that `num_workers` used to mean.

    >>> pool_of("auto")
    {'type': 'elastic'}
    """
    if num_workers == "auto":
        return {"type": "elastic"}
    return {"type": "static", "num_workers": num_workers}


def filters_of(drop_zero_advantage: Any) -> Any:
    """The filters that `drop_zero_advantage` used to mean.

    >>> filters_of(False)
    []
    """
    return [{"type": "zero_advantage"}] if drop_zero_advantage else []


@dataclass(frozen=True)
class Rename:
    """One deprecated key, as a dotted pattern, and its successor in the same entry."""

    old: str
    """The deprecated key; `*` matches every entry of a list."""
    new: str
    """The key to write now, with as many `*`."""
    convert: Callable[[Any], Any] | None = None
    """Makes the new value from the old one. None means that the value stays."""


_ENV = "orchestrator.train.env.*"
_ENVS = (_ENV, "orchestrator.eval.env.*", "eval.env.*", "env.*")
"""Where sources are written: those that train and that measure in an RL run, in sft, in eval."""
RENAMES: tuple[Rename, ...] = (
    Rename("orchestrator.sampling", "orchestrator.train.sampling"),
    Rename("orchestrator.env", "orchestrator.train.env"),
    *(
        Rename(f"{sampling}.max_tokens", f"{sampling}.max_completion_tokens")
        for sampling in (
            "orchestrator.train.sampling",
            "orchestrator.eval.sampling",
            "eval.sampling",
            "sampling",
            *(f"{env}.sampling" for env in _ENVS),
            *(f"{env}.agents.*.sampling" for env in _ENVS),
        )
    ),
    *(Rename(f"{env}.num_workers", f"{env}.pool", pool_of) for env in _ENVS),
    Rename("orchestrator.drop_zero_advantage", "orchestrator.filters", filters_of),
)
"""Applied from top to bottom: a later line sees what the earlier ones moved."""


@dataclass(frozen=True)
class Translation:
    """A table without deprecated keys, and what was done to it."""

    values: dict[Any, Any]
    """The translated table."""
    moves: tuple[tuple[KeyPath, KeyPath], ...]
    """Old place and new place of every moved value, in order."""
    warnings: tuple[str, ...]
    """One sentence for each deprecated key that was met."""

    def place_before(self, path: KeyPath) -> KeyPath:
        """Where the value that is now at `path` was written."""
        for old, new in reversed(self.moves):
            if path[: len(new)] == new:
                path = (*old, *path[len(new) :])
        return path


def translate(values: dict[Any, Any]) -> Translation:
    """Replace every deprecated key; translating twice changes nothing.

    A value under the new key wins over one under the old key.
    """
    result = copy.deepcopy(values)
    moves: list[tuple[KeyPath, KeyPath]] = []
    warnings: list[str] = []
    for rename in RENAMES:
        found = list(_matches(result, tuple(rename.old.split("."))))
        moved = [(old, new) for old in found if (new := _move(result, rename, old)) is not None]
        moves.extend(moved)
        if moved:
            warnings.append(_warning(rename, [old for old, _ in moved]))
    return Translation(values=result, moves=tuple(moves), warnings=tuple(warnings))


def complete_ids(values: dict[Any, Any]) -> dict[Any, Any]:
    """A source without `id` is the task set that its `taskset.id` names; returns a copy."""
    result = copy.deepcopy(values)
    for env in _ENVS:
        for place in _matches(result, tuple(env.split("."))):
            source = _table_for(result, (*place, "id"))
            taskset = source.get("taskset") if source else None
            if not source or "id" in source or not isinstance(taskset, dict):
                continue
            if "id" in taskset:
                source["id"] = taskset.pop("id")
    return result


def _warning(rename: Rename, found: list[KeyPath]) -> str:
    """What to write instead, once for all places."""
    sentence = f"{dotted(found[0])} is deprecated; write {rename.new}"
    if rename.convert is pool_of:
        sentence += ' = {type = "static", num_workers = n} or {type = "elastic"}'
    if rename.convert is filters_of:
        sentence += ' = [{type = "zero_advantage"}], or [] for no filter'
    return f"{sentence} ({len(found)} places)" if len(found) > 1 else sentence


def _matches(value: Any, pattern: tuple[str, ...], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """The places in `value` that a pattern names."""
    if not pattern:
        yield prefix
        return
    for key, child in _entries(value):
        if pattern[0] == ANY or key == pattern[0]:
            yield from _matches(child, pattern[1:], (*prefix, key))


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a table, or places and values of a list."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _successor(rename: Rename, old: KeyPath) -> KeyPath:
    """The new place of what is at `old`: the same entries, under the new names."""
    pattern = rename.old.split(".")
    entries = iter(part for part, name in zip(old, pattern, strict=True) if name == ANY)
    return tuple(next(entries) if name == ANY else name for name in rename.new.split("."))


def _move(root: dict[Any, Any], rename: Rename, old: KeyPath) -> KeyPath | None:
    """Move one value and return its new place; None when something there is in the way.

    A key that is left behind is refused later as unknown, with its successor as suggestion.
    """
    new = _successor(rename, old)
    table = _table_for(root, new)
    if table is None or isinstance(table.get(new[-1]), list):
        return None
    value = _table_for(root, old).pop(old[-1])  # type: ignore[union-attr]
    if rename.convert is not None:
        value = rename.convert(value)
    table[new[-1]] = _joined(table.get(new[-1]), value)
    return new


def _table_for(root: Any, path: KeyPath) -> dict[Any, Any] | None:
    """The table that holds the last part of `path`, made where missing; None if it is none."""
    for part in path[:-1]:
        if isinstance(root, dict):
            root = root.setdefault(part, {})
        elif isinstance(root, list) and isinstance(part, int):
            root = root[part]
        else:
            return None
    return root if isinstance(root, dict) else None


def _joined(present: Any, value: Any) -> Any:
    """`value` merged with what is `present`: the explicit value wins, key by key."""
    if present is None:
        return value
    if not (isinstance(present, dict) and isinstance(value, dict)) or "type" in value:
        return present
    both = {**value, **present}
    return {key: _joined(present.get(key), value.get(key, both[key])) for key in both}

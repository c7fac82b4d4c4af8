"""Layers of config values, merged left to right, each value with the place it came from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from gradus.config.keys import KeyPath, nearest_above
from gradus.config.problems import Problem

Place = Callable[[KeyPath], str]
"""Names the file and line, or the flag, where the value at a key path was written."""


class MergedConfig:
    """The merged values, where each was written, and what to say of them.

    Tables are merged key by key; every other value replaces what was there, and so does a table
    whose `type` differs, because the keys of one variant mean nothing to another.

        >>> merged = MergedConfig()
        >>> merged.add({"max_steps": 3}, lambda path: "run.toml:1")
        >>> merged.place(("max_steps",))
        'run.toml:1'
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self._places: dict[KeyPath, str] = {}

    def add(self, layer: dict[Any, Any], place: Place) -> None:
        self._merge(self.values, layer, (), place)

    def place(self, path: KeyPath) -> str | None:
        """Where the value at `path`, or the nearest table around it, was written last."""
        return nearest_above(self._places, path)

    def _merge(self, table: Any, layer: dict[Any, Any], at: KeyPath, place: Place) -> None:
        for key, value in layer.items():
            path = (*at, key)
            present = table.get(key)
            if not isinstance(value, dict):
                self._replace(table, value, path, place)
            elif _names_list_entries(value, present):
                table[key] = self._merge_list(present or [], value, path, place)
            else:
                if not isinstance(present, dict) or _retypes(present, value):
                    self._replace(table, {}, path, place)
                self._places[path] = place(path)
                self._merge(table[key], value, path, place)

    def _merge_list(
        self, entries: list[Any], changes: dict[Any, Any], at: KeyPath, place: Place
    ) -> list[Any]:
        """Apply changes to single entries of a list; one past the end adds an entry."""
        changed: dict[Any, Any] = dict(enumerate(entries))
        for index in sorted(changes):
            if index <= len(changed):
                self._merge(changed, {index: changes[index]}, at, place)
                continue
            path = (*at, index)
            self._places[path] = place(path)
            text = f"no such entry; the list has {len(changed)}, counted from 0"
            self.problems.append(Problem(path, text))
        return list(changed.values())

    def _replace(self, table: Any, value: Any, path: KeyPath, place: Place) -> None:
        for old in [old for old in self._places if old[: len(path)] == path]:
            del self._places[old]
        table[path[-1]] = copy.deepcopy(value)
        self._remember(value, path, place)

    def _remember(self, value: Any, path: KeyPath, place: Place) -> None:
        self._places[path] = place(path)
        if isinstance(value, dict | list):
            for key, child in value.items() if isinstance(value, dict) else enumerate(value):
                self._remember(child, (*path, key), place)


def _names_list_entries(value: dict[Any, Any], present: Any) -> bool:
    """Whether the keys of `value` are places in a list, from `--some.list.0.key`."""
    is_places = bool(value) and all(isinstance(key, int) for key in value)
    return is_places and (present is None or isinstance(present, list))


def _retypes(present: dict[str, Any], value: dict[Any, Any]) -> bool:
    """Whether `value` selects another variant than `present`."""
    return "type" in value and "type" in present and value["type"] != present["type"]


def nested(path: KeyPath, value: Any) -> dict[Any, Any]:
    """A table that holds `value` at `path` and nothing else."""
    for part in reversed(path):
        value = {part: value}
    table: dict[Any, Any] = value
    return table

"""Layers of config values, merged left to right, each value with the place it came from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from gradus.config.keys import KeyPath, annotation_at, models, nearest_above
from gradus.config.problems import Problem
from gradus.config.read.arguments import Text
from gradus.config.read.words import from_json
from gradus.config.schema.base import tag_of, variant_tag

Place = Callable[[KeyPath], str]
"""Names the file and line, or the flag, where the value at a key path was written."""


class MergedConfig:
    """The merged values, where each was written, and what to say of them.

    Tables are merged key by key, also those that a flag gives as JSON; every other value replaces
    what was there. Another `type` of a table drops what only other types have.

        >>> merged = MergedConfig()
        >>> merged.add({"max_steps": 3}, lambda path: "run.toml:1")
        >>> merged.place(("max_steps",))
        'run.toml:1'
    """

    def __init__(self, model: Any = object) -> None:
        self.model = model
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
            if isinstance(value, dict):
                present = self._opened(present, path)
            elif isinstance(present, dict):
                value = self._opened({} if getattr(value, "is_on", False) else value, path)
            if not isinstance(value, dict):
                self._replace(table, value, path, place)
            elif _names_list_entries(value, present):
                table[key] = self._merge_list(present or [], value, path, place)
            else:
                if isinstance(present, dict):
                    table[key] = present
                    self._change_type(present, value, path)
                else:
                    self._replace(table, {}, path, place)
                self._places[path] = place(path)
                self._merge(table[key], value, path, place)

    def _opened(self, value: Any, path: KeyPath) -> Any:
        """A value, or the table or list of which a flag gave the JSON."""
        if isinstance(value, Text) and value[:1] in ("{", "["):
            try:
                return from_json(value)
            except ValueError as error:
                self.problems.append(Problem(path, str(error)))
        return value

    def _change_type(self, table: dict[Any, Any], value: dict[Any, Any], at: KeyPath) -> None:
        """Drop what only other types have than that of `value`, or all where no type is known.

        Not what a flag gave: that is a mistake to be told of.
        """
        chosen, before = value.get("type"), table.get("type")
        variants = {tag_of(it): it.model_fields for it in models(annotation_at(self.model, at))}
        is_free = not variants
        if chosen in (None, before) or None in variants or (is_free and before is None):
            return
        known = variants.pop(variant_tag(chosen), {})
        for path in [(*at, key) for key in table if key not in known]:
            is_other = is_free or any(path[-1] in fields for fields in variants.values())
            if is_other and not str(self.place(path)).startswith("--"):
                del table[path[-1]]
                self._forget(path)

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
        self._forget(path)
        table[path[-1]] = copy.deepcopy(value)
        self._remember(value, path, place)

    def _forget(self, path: KeyPath) -> None:
        for old in [old for old in self._places if old[: len(path)] == path]:
            del self._places[old]

    def _remember(self, value: Any, path: KeyPath, place: Place) -> None:
        self._places[path] = place(path)
        if isinstance(value, dict | list):
            for key, child in value.items() if isinstance(value, dict) else enumerate(value):
                self._remember(child, (*path, key), place)


def _names_list_entries(value: dict[Any, Any], present: Any) -> bool:
    """Whether the keys of `value` are places in a list, from `--some.list.0.key`."""
    is_places = bool(value) and all(isinstance(key, int) for key in value)
    return is_places and (present is None or isinstance(present, list))


def nested(path: KeyPath, value: Any) -> dict[Any, Any]:
    """A table that holds `value` at `path` and nothing else."""
    for part in reversed(path):
        value = {part: value}
    table: dict[Any, Any] = value
    return table

"""Files and flags of a command line become one config, which pydantic reads and refuses.

Files merge left to right, table by table; flags apply after them, left to right.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from gradus.config.keys import (
    UNKNOWN,
    KeyPath,
    annotation_at,
    depth_of,
    dotted,
    key_path,
    members,
    models,
    nested,
    value_at,
)
from gradus.config.problems import Problem, validation_problems
from gradus.config.schema.base import StrictConfig, tag_of, variant_tag
from gradus.errors import ConfigError, refuse

Config = TypeVar("Config", bound=StrictConfig)
Table = dict[Any, Any]
FILE_SIGN = "@"
_SUFFIXES = (".toml", ".json")
_SOURCES: Sequence[KeyPath] = (
    *(("orchestrator", "train", "env"), ("orchestrator", "eval", "env")),
    *(("eval", "env"), ("env",)),
)
"""Where sources stand, in a file of each command."""


def load_config(
    model: type[Config],
    words: Sequence[str],
    *,
    check: Callable[[Config], list[Problem]] | None = None,
    base: Mapping[str, Any] | None = None,
    base_name: str = "the recorded config",
) -> Config:
    """The config that a command line describes; touches nothing but the files that it names.

    Raises one ConfigError with every problem of one stage (files, keys and types, `check`), each
    with its file and line, its flag, or what `base_name` calls the base.

        >>> load_config(RunConfig, ["@", "run.toml", "--trainer.optimizer.lr", "1e-5"])
    """
    layers = Layers(model)
    layers.add(dict(base or {}), lambda _: base_name)
    layers.read(words)
    values, problems, config = complete_ids(layers.values), layers.problems, None
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        unread = {problem.path for problem in problems}
        found = validation_problems(error, model, values)
        problems += [problem for problem in found if problem.path not in unread]
    refuse(dict.fromkeys(map(layers.located, problems)))
    assert config is not None
    if check is not None:
        refuse(map(layers.located, check(config)))
    return config


def given_values(words: Sequence[str]) -> Table:
    """What a command line says, merged, valid or not."""
    layers = Layers(object)
    layers.read(words)
    return layers.values


def top_level_keys(words: Sequence[str]) -> set[str]:
    """The sections and keys at the top of what a command line describes, valid or not."""
    return set(given_values(words))


def complete_ids(values: Table) -> Table:
    """A source without `id` is the task set that its `taskset.id` names; returns a copy."""
    values = copy.deepcopy(values)
    for path in _SOURCES:
        sources = value_at(path, values)
        for source in sources if isinstance(sources, list) else ():
            taskset = source.get("taskset") if isinstance(source, dict) else None
            if isinstance(taskset, dict) and "id" in taskset and "id" not in source:
                source["id"] = taskset.pop("id")
    return values


@dataclass
class Layers:
    """The merged values of files and flags, and where each was written.

    >>> layers = Layers(RunConfig)
    >>> layers.read(["@", "run.toml", "--max-steps", "3"])
    >>> layers.place(("max_steps",))
    '--max-steps'
    """

    model: Any
    """What the values must become; `object` takes everything."""
    values: Table = field(default_factory=dict)
    """What was merged so far."""
    problems: list[Problem] = field(default_factory=list)
    """What cannot be, before pydantic looks at the values."""
    written: list[tuple[Table, Callable[[KeyPath], str]]] = field(default_factory=list)
    """Each layer, and what names the place of a key in it."""
    flagged: set[KeyPath] = field(default_factory=set)
    """Keys that flags gave, which another `type` of their table does not drop."""

    def read(self, words: Sequence[str]) -> None:
        """Add the files and then the flags; ConfigError with every one that cannot be read."""
        rest, flags, wrong = list(words), [], []
        while rest:
            word = rest.pop(0)
            is_flag = word.startswith("--") and len(word) > len("--")
            try:
                if not is_flag and (word[:1] == FILE_SIGN or PurePath(word).suffix in _SUFFIXES):
                    self._mount((), _file_of(word, rest, FILE_SIGN))
                elif is_flag and "=" not in word and rest and rest[0].startswith(FILE_SIGN):
                    sign = f"{word} {FILE_SIGN}"
                    self._mount(_path_of_flag(word), _file_of(rest.pop(0), rest, sign))
                elif is_flag:
                    name, is_attached, text = word.partition("=")
                    has_value = not is_attached and bool(rest) and not rest[0].startswith("--")
                    typed = text if is_attached else rest.pop(0) if has_value else None
                    flags.append((name, _path_of_flag(name), typed))
                else:
                    raise ConfigError(
                        f"unexpected {word!r}; write '@ file.toml' for a file, '--key value' for "
                        'one value, and a list as JSON in quotes: \'["a", "b"]\''
                    )
            except ConfigError as error:
                wrong.append(str(error))
        refuse(wrong)
        for name, path, typed in flags:
            self._flag(name, path, typed)

    def _mount(self, section: KeyPath, name: str) -> None:
        wanted = annotation_at(self.model, section)
        takes_table = models(wanted) or {dict, Any, object} & _kinds(wanted)
        if wanted is not UNKNOWN and not takes_table:
            raise ConfigError(f"--{dotted(section)} takes a value and no file; {name} is one")
        values, place = read_config_file(name)
        depth = len(section)
        self.add(nested(section, values), lambda path: place(path[depth:]))

    def _flag(self, name: str, path: KeyPath, typed: str | None) -> None:
        try:
            path, value = self._switch(path) if typed is None else (path, self._typed(path, typed))
        except ValueError as error:
            self.problems.append(Problem(path, str(error)))
            value = None
        self.flagged.add(path)
        self.add(nested(path, value), lambda _: name)

    def _switch(self, path: KeyPath) -> tuple[KeyPath, Any]:
        """`--x` switches on, `--no-x`, `--no-section.x` and `--section.no-x` switch off."""
        off = [place for place in (0, -1) if str(path[place]).startswith("no_")]
        if off:
            parts = list(path)
            parts[off[0]] = str(parts[off[0]]).removeprefix("no_")
            path = tuple(parts)
        wanted = annotation_at(self.model, path)
        if wanted is UNKNOWN or {bool, Any, object} & {*members(wanted)}:
            return path, not off
        if models(wanted) and (not off or type(None) in members(wanted)):
            return path, None if off else {}
        raise ValueError("cannot be switched off" if off else "needs a value after it")

    def _typed(self, path: KeyPath, text: str) -> Any:
        """A word of the command line in the type that its key wants; the model refuses the rest."""
        wanted = annotation_at(self.model, path)
        if text == "None" or wanted is UNKNOWN:
            return None if text == "None" else text
        kinds = members(wanted)
        is_free = {Any, object} & {*kinds}
        takes_json = {list, tuple, dict, *models(wanted)} & _kinds(wanted)
        if text[:1] in ("[", "{") and (takes_json or is_free):
            return _from_json(text)
        if is_free:
            with contextlib.suppress(ValueError):
                return _from_json(text)
            return text
        for kind in sorted(kinds, key=lambda kind: kind is str):
            if kind not in models(wanted):
                with contextlib.suppress(ValidationError):
                    return TypeAdapter(kind).validate_strings(text)
        return text

    def add(self, layer: Table, place: Callable[[KeyPath], str] = lambda _: "") -> None:
        """Merge a layer; `place` names the file and line, or the flag, of a key in it."""
        self.written.append((layer, place))
        self._merge(self.values, layer, ())

    def _merge(self, table: Table, layer: Table, at: KeyPath) -> None:
        """Tables merge key by key; every other value replaces what was there."""
        for key, value in layer.items():
            path, present = (*at, key), table.get(key)
            if not isinstance(value, dict):
                table[key] = copy.deepcopy(value)
            elif _names_entries(value) and (present is None or isinstance(present, list)):
                table[key] = self._change_entries(present or [], value, path)
            else:
                inner = present if isinstance(present, dict) else {}
                self._change_type(inner, value, path)
                table[key] = inner
                self._merge(inner, value, path)

    def _change_entries(self, entries: list[Any], changes: Table, at: KeyPath) -> list[Any]:
        """Changes to single entries of a list; one past the end adds an entry."""
        changed: Table = dict(enumerate(entries))
        for index in sorted(changes):
            if index <= len(changed):
                self._merge(changed, {index: changes[index]}, at)
                continue
            text = f"no such entry; the list has {len(changed)}, counted from 0"
            self.problems.append(Problem((*at, index), text))
        return list(changed.values())

    def _change_type(self, table: Table, value: Table, at: KeyPath) -> None:
        """Drop what the new `type` of a table does not have, but nothing that a flag gave."""
        chosen, before = value.get("type"), table.get("type")
        fields = {it: it.model_fields for it in models(annotation_at(self.model, at))}
        variants = {tag_of(model): names for model, names in fields.items()}
        if chosen in (None, before) or None in variants or (not variants and before is None):
            return
        known = variants.get(variant_tag(chosen), {})
        others = {name for names in variants.values() for name in names}
        for key in [key for key in table if key not in known and (key in others or not variants)]:
            if not any(path[: len(at) + 1] == (*at, key) for path in self.flagged):
                del table[key]

    def place(self, path: KeyPath) -> str:
        """Where the value at `path`, or the nearest table around it, was written last."""
        deepest, found = 0, ""
        for layer, place in reversed(self.written):
            depth = depth_of(path, layer)
            if depth > deepest:
                deepest, found = depth, place(path)
            if depth == len(path) or not isinstance(value_at(path[:depth], layer), dict):
                break  # What stands in earlier layers was replaced.
        return found

    def located(self, problem: Problem) -> str:
        place = self.place(problem.path)
        is_key = place.startswith("--") and key_path(place) == problem.path
        said = problem.message if is_key else str(problem)
        return f"{place}: {said}" if place else said


def _path_of_flag(flag: str) -> KeyPath:
    path = key_path(flag)
    if "" in path:
        raise ConfigError(f"{flag}: a key must not begin or end with a dot")
    return path


def _file_of(word: str, rest: list[str], sign: str) -> str:
    """The file named in `word` (`@file`) or after it (`@ file`)."""
    name = word.removeprefix(FILE_SIGN)
    if not name and rest and not rest[0].startswith("--"):
        name = rest.pop(0)
    if not name:
        raise ConfigError(f"{sign} needs a file after it: '{sign} file.toml'")
    return name


def _kinds(annotation: Any) -> set[Any]:
    return {get_origin(member) or member for member in members(annotation)}


def _names_entries(value: Table) -> bool:
    """Whether the keys of `value` are places in a list, from `--some.list.0.key`."""
    return bool(value) and all(isinstance(key, int) for key in value)


def read_config_file(name: str) -> tuple[Table, Callable[[KeyPath], str]]:
    """The values of a TOML or JSON file, and what names the place of a key in it."""
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such config file (seen from {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read as UTF-8 text ({error})") from None
    suffix = PurePath(name).suffix
    if suffix not in _SUFFIXES:
        raise ConfigError(f"{name}: a config file must end in .toml or .json")
    try:
        values = tomllib.loads(text) if suffix == ".toml" else _from_json(text)
    except (ValueError, RecursionError) as error:
        line = str(error).partition("at line ")[2].partition(",")[0].partition(" ")[0]
        at = line if line.isdecimal() else text.count("\n") + 1
        raise ConfigError(f"{name}:{at}: not {suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: must hold a table at the top: {{...}}")

    def place(path: KeyPath) -> str:
        line = line_of(text, path) if suffix == ".toml" else None
        return f"{name}:{line}" if line else name

    for path, reason in _unwritable(values, ()):
        raise ConfigError(f"{place(path)}: {dotted(path)}: {reason}")
    return values, place


def _from_json(text: str) -> Any:
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"{text[:60]!r} is not JSON: {error}") from None
    for _, reason in _unwritable(value, ()):
        raise ValueError(reason)
    return value


def _unwritable(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """What JSON cannot hold later, in which a run keeps its config: dates, nan, broken text."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unwritable(child, (*path, key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} must be a finite number"
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield path, f"{value} is a date or time; put it in quotes"


def line_of(text: str, path: KeyPath) -> int | None:
    """The line, from 1, where the value at `path` or the nearest table around it begins.

    That is the first line with which the text above it holds the key: whatever TOML allows counts
    as it is read, and what stands inside a longer value is none.
    """
    lines = text.replace("\r\n", "\n").split("\n")

    def read(number: int) -> tuple[int, int]:
        """How many of the first lines can be read, and how deep they hold the path."""
        for end in range(number, 0, -1):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                return end, depth_of(path, tomllib.loads("\n".join(lines[:end])))
        return 0, 0

    depth = read(len(lines))[1]
    if depth == 0:
        return None
    low, high = 0, len(lines)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if read(middle)[1] >= depth else (middle, high)
    return read(high - 1)[0] + 1

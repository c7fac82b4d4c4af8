"""One config file as a table with the line of each key."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gradus.config.keys import KeyPath, dotted, nearest_above
from gradus.errors import ConfigError


@dataclass(frozen=True)
class ConfigFile:
    """The content of one file.

    >>> ConfigFile("run.toml", {"max_steps": 3}, {("max_steps",): 1}).place(("max_steps",))
    'run.toml:1'
    """

    name: str
    """Path as the user wrote it."""
    values: dict[str, Any]
    """Its content."""
    lines: Mapping[KeyPath, int]
    """Line of each key, as far as known."""

    def place(self, path: KeyPath) -> str:
        line = nearest_above(self.lines, path)
        return self.name if line is None else f"{self.name}:{line}"


def read_config_file(name: str) -> ConfigFile:
    """Read a TOML or JSON file; refuses anything that JSON could not hold later."""
    text = _read_text(name)
    if name.endswith(".toml"):
        values, lines = _parse_toml(name, text), key_lines(text)
    elif name.endswith(".json"):
        values, lines = _parse_json(name, text), {}
    else:
        raise ConfigError(f"{name}: a config file must end in .toml or .json")
    file = ConfigFile(name=name, values=values, lines=lines)
    _refuse_unwritable(file, values, ())
    return file


def _read_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such config file (seen from {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read ({error})") from None


def _parse_toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib states the line in its message, but for the end of the file.
        line = str(error).rpartition("(at line ")[2].partition(",")[0]
        at = line if line.isdecimal() else text.count("\n") + 1
        raise ConfigError(f"{name}:{at}: not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None


def _parse_json(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must hold a table at the top: {{...}}")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table from its pairs; a key that occurs twice is an error, as in TOML."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} occurs twice in one table")
    return table


def refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _refuse_unwritable(file: ConfigFile, value: Any, path: KeyPath) -> None:
    """Refuse values that cannot be written as JSON again: dates, nan, inf, broken text."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in entries:
            _refuse_unwritable(file, child, (*path, key))
        return
    reason = _why_unwritable(value)
    if reason is not None:
        raise ConfigError(f"{file.place(path)}: {dotted(path)}: {reason}")


def _why_unwritable(value: Any) -> str | None:
    """Why a config cannot hold a value; None when it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} must be a finite number"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{value!r} is not valid text"
        return None
    if value is None or isinstance(value, bool | int | float):
        return None
    return f"{value} is a date or time; put it in quotes"


_KEY = r"""[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'"""
_DOTTED = rf"(?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*"
_TABLE = re.compile(rf"^\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$")
_ARRAY = re.compile(rf"^\s*\[\[\s*({_DOTTED})\s*\]\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"^\s*({_DOTTED})\s*=(.*)$")
_TRIPLE_QUOTES = ('"""', "'''")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line numbers, from 1, of the keys and tables of a TOML text that is known to parse.

    Keys inside inline tables are not listed; `nearest_above` falls back to the key that holds them.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    open_quotes: str | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        if open_quotes is not None:
            open_quotes = None if open_quotes in line else open_quotes
            continue
        if found := _ARRAY.match(line):
            name = _place(_parts(found[1]), counts)
            counts[name] = counts.get(name, -1) + 1
            table = (*name, counts[name])
            lines[table] = number
            lines.setdefault(name, number)
        elif found := _TABLE.match(line):
            table = _place(_parts(found[1]), counts)
            lines[table] = number
        elif found := _ASSIGNMENT.match(line):
            lines[(*table, *_parts(found[1]))] = number
            open_quotes = _opened_quotes(found[2])
    return lines


def _parts(text: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, text))


def _place(path: KeyPath, counts: Mapping[KeyPath, int]) -> KeyPath:
    """The path with the current number after each name that is an array of tables."""
    placed: KeyPath = ()
    for index, part in enumerate(path):
        placed = (*placed, part)
        if placed in counts and index < len(path) - 1:
            placed = (*placed, counts[placed])
    return placed


def _opened_quotes(value: str) -> str | None:
    """The triple quotes that `value` opens and does not close."""
    start = value.lstrip()
    for quotes in _TRIPLE_QUOTES:
        if start.startswith(quotes) and quotes not in start[len(quotes) :]:
            return quotes
    return None

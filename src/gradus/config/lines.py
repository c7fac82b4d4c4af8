"""Where each key of a TOML text stands, so that an error can name the line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradus.config.schema import KeyPath

_KEY = r"""[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'"""
_DOTTED = rf"(?:{_KEY})(?:\s*\.\s*(?:{_KEY}))*"
_TABLE = re.compile(rf"^\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?$")
_ARRAY = re.compile(rf"^\s*\[\[\s*({_DOTTED})\s*\]\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"^\s*({_DOTTED})\s*=(.*)$")
_TRIPLE_QUOTES = ('"""', "'''")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line numbers, from 1, of the keys and tables of a TOML text that is known to parse.

    Keys inside inline tables are not listed; `line_of` falls back to the key that holds them.
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


def line_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """The line of `path`, or of the nearest table around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _parts(text: str) -> KeyPath:
    """The names of a dotted TOML key, without quotes."""
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

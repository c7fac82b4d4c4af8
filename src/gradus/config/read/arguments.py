"""The grammar of the command line: files, files for a section, and dotted overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem

FILE_SIGN = "@"

FILE_SUFFIXES = (".toml", ".json")
"""Endings of config files."""


class Text(str):
    """A value as it was typed on the command line; `load.py` gives it the type of its key."""

    __slots__ = ()


class BareFlag:
    """A flag without value: `--x` (True) or `--no-x` (False, or None for a section)."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on

    def __deepcopy__(self, memo: dict[int, Any]) -> BareFlag:
        return self


@dataclass(frozen=True)
class FileArgument:
    """`@ file`, or `--section @ file`: a file and the section that it fills."""

    file: str
    """Path as it was written."""
    section: KeyPath
    """Where the content goes; empty for the root."""


@dataclass(frozen=True)
class Override:
    """`--some.key value`."""

    path: KeyPath
    """The key, in snake_case."""
    flag: str
    """The flag as it was written, for messages."""
    value: Text | BareFlag
    """What was typed after it."""


@dataclass
class Arguments:
    """A parsed command line, in the order in which it was written."""

    files: list[FileArgument] = field(default_factory=list)
    """Files to merge, left to right."""
    overrides: list[Override] = field(default_factory=list)
    """Overrides to apply after all files, left to right."""
    problems: list[Problem] = field(default_factory=list)
    """What could not be read."""


def key_path(flag: str) -> KeyPath:
    """The key path that a flag names.

    >>> key_path("orchestrator.train.env.0.group-size")
    ('orchestrator', 'train', 'env', 0, 'group_size')
    """
    return tuple(
        int(part) if part.isdecimal() else part.replace("-", "_") for part in flag.split(".")
    )


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Read `@ file`, `--section @ file`, `--key value`, `--key=value`, `--x` and `--no-x`.

    A word that ends like a config file is that file even without the sign.
    """
    parsed = Arguments()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith(FILE_SIGN):
            _read_file(parsed, word, rest, section=(), after=FILE_SIGN)
        elif word.startswith("--") and len(word) > len("--"):
            _read_flag(parsed, word, rest)
        elif PurePath(word).suffix in FILE_SUFFIXES:
            parsed.files.append(FileArgument(file=word, section=()))
        else:
            text = (
                f"unexpected {word!r}; write '@ file.toml' for a file, '--key value' for one "
                'value, and a list as JSON in quotes: \'["a", "b"]\''
            )
            parsed.problems.append(Problem((), text))
    return parsed


def _read_file(
    parsed: Arguments, word: str, rest: list[str], *, section: KeyPath, after: str
) -> None:
    """Take the file named in `word` (`@file`) or after it (`@ file`)."""
    file = word.removeprefix(FILE_SIGN)
    if not file and rest and not rest[0].startswith("--"):
        file = rest.pop(0)
    if file:
        parsed.files.append(FileArgument(file=file, section=section))
    else:
        parsed.problems.append(Problem((), f"{after} needs a file after it: '{after} file.toml'"))


def _read_flag(parsed: Arguments, word: str, rest: list[str]) -> None:
    flag, equals, attached = word.partition("=")
    path = key_path(flag.removeprefix("--"))
    if "" in path:
        parsed.problems.append(Problem((), f"{flag}: a key must not begin or end with a dot"))
    elif equals:
        parsed.overrides.append(Override(path, flag, Text(attached)))
    elif rest and rest[0].startswith(FILE_SIGN):
        _read_file(parsed, rest.pop(0), rest, section=path, after=f"{flag} {FILE_SIGN}")
    elif rest and not rest[0].startswith("--"):
        parsed.overrides.append(Override(path, flag, Text(rest.pop(0))))
    else:
        parsed.overrides.append(_bare(path, flag))


def _bare(path: KeyPath, flag: str) -> Override:
    """`--x` switches on, `--no-x`, `--no-section.x` and `--section.no-x` switch off."""
    for index in (0, len(path) - 1):
        part = str(path[index])
        if part.startswith("no_"):
            positive = (*path[:index], part.removeprefix("no_"), *path[index + 1 :])
            return Override(positive, flag, BareFlag(is_on=False))
    return Override(path, flag, BareFlag(is_on=True))

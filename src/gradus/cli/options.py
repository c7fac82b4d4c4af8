"""Options of a command that are not config keys, and the help of a command."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from gradus.config import StrictConfig, command_help
from gradus.errors import ConfigError

HELP_WORDS = ("--help", "-h")
_MIN_WIDTH = 60
_MAX_WIDTH = 110


def take_options(words: Sequence[str], known: Mapping[str, str]) -> tuple[set[str], list[str]]:
    taken = {word for word in words if word in known}
    return taken, [word for word in words if word not in known]


def take_value(
    words: Sequence[str], option: str, *, wants: str = "the folder of a run"
) -> tuple[str | None, list[str]]:
    """The value after `option`, or attached as `option=value`, and the other words.

    ConfigError, which says what it `wants`, when the option has no value or is given twice.
    """
    found, rest = take_values(words, option, wants=wants)
    if len(found) > 1:
        raise ConfigError(f"{option} is given twice: {', '.join(found)}")
    return (found[0] if found else None), rest


def take_values(words: Sequence[str], option: str, *, wants: str) -> tuple[list[str], list[str]]:
    """The values of an option that may be given again, and the other words."""
    rest: list[str] = []
    found: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, equals, attached = word.partition("=")
        if name != option:
            rest.append(word)
            continue
        value = attached if equals else next(waiting, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{option} needs {wants} after it")
        found.append(value)
    return found, rest


def whole_number(option: str, word: str | None) -> int | None:
    """The value of an option that counts from 1; None where it is not given."""
    if word is not None and (not word.isdecimal() or int(word) < 1):
        raise ConfigError(f"{option} {word}: give a whole number, 1 or more")
    return None if word is None else int(word)


def take_optional(words: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option that may be given without one, "" then, and the other words.

    >>> take_optional(["--ray", "@", "run.toml"], "--ray")
    ('', ['@', 'run.toml'])
    """
    followed = [*words[1:], "@"]
    alone = [
        word == option and (follower == "@" or follower.startswith("-"))
        for word, follower in zip(words, followed, strict=False)
    ]
    value, rest = take_value(
        [f"{word}= " if it else word for word, it in zip(words, alone, strict=True)], option
    )
    return value and value.strip(), rest


def wants_help(words: Sequence[str]) -> bool:
    return any(word in HELP_WORDS for word in words)


def print_help(
    command: str,
    summary: str,
    model: type[StrictConfig],
    options: Mapping[str, str] | None = None,
    *,
    words: Sequence[str] = (),
) -> None:
    """Print what a command does, its options, and the keys of its config.

    A name after `--help` in `words` asks for that section, or that key, alone.
    """
    width = min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)
    asked = _asked(words)
    text = command_help(model, command.partition(" [")[0], asked, width=width)
    if asked is None:
        print(
            f"usage: gradus {command} [@ file.toml ...] [--section @ file.toml ...] "
            "[--key value ...]"
        )
        print(f"\n{summary}\n")
        width_of_options = max(12, *(len(option) + 2 for option in (options or {"": ""})))
        for option, meaning in (options or {}).items():
            print(f"  {option:<{width_of_options}}{meaning}")
        if options:
            print()
    print(text)


def _asked(words: Sequence[str]) -> str | None:
    """The section that is named right after `--help`."""
    place = next((index for index, word in enumerate(words) if word in HELP_WORDS), len(words))
    following = words[place + 1 : place + 2]
    return following[0] if following and following[0] != "@" else None

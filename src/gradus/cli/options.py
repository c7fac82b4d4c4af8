"""Options of a command that belong to no config key, and the help of a command."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from gradus.config.base import StrictConfig
from gradus.config.document import help_text

HELP_WORDS = ("--help", "-h")
_MIN_WIDTH = 60
_MAX_WIDTH = 110


def take_options(words: Sequence[str], known: Mapping[str, str]) -> tuple[set[str], list[str]]:
    """The known options among the words, and the words that are left for the config."""
    taken = {word for word in words if word in known}
    return taken, [word for word in words if word not in known]


def wants_help(words: Sequence[str]) -> bool:
    """Whether the user asks what the command takes."""
    return any(word in HELP_WORDS for word in words)


def print_help(
    command: str, summary: str, model: type[StrictConfig], options: Mapping[str, str] | None = None
) -> None:
    """Print what a command does, its options, and the whole schema of its config."""
    width = min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)
    print(
        f"usage: gradus {command} [@ file.toml ...] [--section @ file.toml ...] [--key value ...]"
    )
    print(f"\n{summary}\n")
    for option, text in (options or {}).items():
        print(f"  {option:<12}{text}")
    if options:
        print()
    print(help_text(model, width=width))

"""`gradus export`: a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradus.cli.options import wants_help
from gradus.errors import ConfigError
from gradus.log import configure_logging

USAGE = """usage: gradus export RUN_OR_CHECKPOINT DIRECTORY

Writes the newest checkpoint of a run (runs/NAME), or the one that is named
(runs/NAME/checkpoints/step_00000100), as a Hugging Face model directory. Every byte of it is
verified first; adapters are added into the weights."""


def run(words: Sequence[str]) -> int:
    """Export what the words name; returns the exit code."""
    if wants_help(words):
        print(USAGE)
        return 0
    if len(words) != 2 or any(word.startswith("-") for word in words):
        raise ConfigError(f"expected a run or a checkpoint, and a directory\n{USAGE}")
    source, directory = Path(words[0]), Path(words[1])
    if not source.is_dir():
        raise ConfigError(f"{source}: no such directory (seen from {Path.cwd()})")
    configure_logging("export")

    from gradus.trainer.export import export

    step = export(source, directory)
    print(f"{directory} holds the weights after {step} steps")
    return 0

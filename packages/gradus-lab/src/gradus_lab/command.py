"""`gradus lab`: the table of its commands; only the module of the one that runs is imported."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from gradus.cli.options import HELP_WORDS
from gradus.errors import ConfigError, ExitCode

COMMANDS = {
    "replay": ("gradus_lab.replay.command", "train a recorded run again, and compare the weights"),
    "sweep": ("gradus_lab.sweep", "train a grid of settings and seeds, and compare"),
    "chaos": (
        "gradus_lab.chaos.command",
        "hurt a run on purpose, and say whether what must hold does",
    ),
    "check-loss": ("gradus_lab.check_loss", "say whether a loss depends on the layout"),
    "mismatch": (
        "gradus_lab.mismatch",
        "split what trainer and engine of a run disagree on into causes",
    ),
}
"""Command → the module whose `run` takes the words after the command, and what is done."""


def run(words: Sequence[str]) -> int:
    if not words or words[0] in HELP_WORDS:
        rows = [f"  {name:<14}{summary}" for name, (_, summary) in COMMANDS.items()]
        print("\n".join(["usage: gradus lab COMMAND ...", "", *rows]))
        return ExitCode.DONE
    if words[0] not in COMMANDS:
        raise ConfigError(f"gradus lab has no {words[0]!r}; there are: {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[words[0]][0])
    return int(module.run(words[1:]))

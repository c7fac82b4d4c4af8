"""What every process of a run does first: watch its launcher, load its config, open its log."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gradus.cli.options import print_help, wants_help
from gradus.config import StrictConfig, load_config
from gradus.log import configure_logging, end_quietly

Config = TypeVar("Config", bound=StrictConfig)


@dataclass(frozen=True)
class Role(Generic[Config]):
    """One kind of process."""

    command: str
    """Its subcommand."""
    model: type[Config]
    """Its config."""
    process: Callable[[Config], str]
    """Its name in logs."""
    start: Callable[[Config], None]
    """Runs it to its end; imports the heavy parts."""


def run_role(role: Role[Config], words: Sequence[str]) -> int:
    """Run one process of a run until it ends by itself or its launcher is gone."""
    if wants_help(words):
        print_help(role.command, "A process of a run, started by the launcher.", role.model)
        return 0

    from gradus.processes.supervisor import watch_death_pipe

    end_quietly()
    watch_death_pipe()
    # The interpreter's last collection walks every imported module: a second or more per process.
    atexit.register(gc.freeze)
    config = load_config(role.model, words)
    rank = os.environ.get("RANK")
    name = role.process(config)
    configure_logging(name if rank is None else f"{name}/{rank}")
    role.start(config)
    return 0

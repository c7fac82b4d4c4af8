"""`gradus replayer`: sends the recorded batches of a run to the trainer of its replay."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import ReplayProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: ReplayProcessConfig) -> None:
    from gradus.orchestrator.replay.replayer import run

    run(config)


ROLE = Role(
    command="replayer",
    model=ReplayProcessConfig,
    process=lambda _: "replayer",
    start=_start,
)

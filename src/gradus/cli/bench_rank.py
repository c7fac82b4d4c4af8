"""`gradus bench-rank`: one rank of a trainer that is measured."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import TrainerProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: TrainerProcessConfig) -> None:
    from gradus.trainer.entry.bench import run

    run(config)


ROLE = Role(
    command="bench-rank",
    model=TrainerProcessConfig,
    process=lambda _: "trainer",
    start=_start,
)

"""`gradus sft-trainer`: one rank of the trainer of a supervised run."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import SftProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: SftProcessConfig) -> None:
    from gradus.trainer.entry.sft import run

    run(config)


ROLE = Role(
    command="sft-trainer",
    model=SftProcessConfig,
    process=lambda _: "trainer",
    start=_start,
)

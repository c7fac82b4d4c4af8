"""`gradus orchestrator`: plays episodes and makes batches."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import OrchestratorProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: OrchestratorProcessConfig) -> None:
    from gradus.orchestrator.orchestrator import run

    run(config)


ROLE = Role(
    command="orchestrator",
    model=OrchestratorProcessConfig,
    process=lambda _: "orchestrator",
    start=_start,
)

"""`gradus env-server`: serves one environment."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import EnvironmentProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: EnvironmentProcessConfig) -> None:
    from gradus.environments.process import serve

    serve(config)


ROLE = Role(
    command="env-server",
    model=EnvironmentProcessConfig,
    process=lambda config: config.process,
    start=_start,
)

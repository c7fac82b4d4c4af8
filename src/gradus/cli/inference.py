"""`gradus inference`: serves the policy."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import InferenceProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: InferenceProcessConfig) -> None:
    from gradus.inference.server import run

    run(config)


ROLE = Role(
    command="inference",
    model=InferenceProcessConfig,
    process=lambda _: "inference",
    start=_start,
)

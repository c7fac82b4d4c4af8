"""`gradus evaluator`: plays the episodes of a stand-alone evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import EvaluatorProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: EvaluatorProcessConfig) -> None:
    from gradus.orchestrator.evaluation.evaluator import run

    run(config)


ROLE = Role(
    command="evaluator",
    model=EvaluatorProcessConfig,
    process=lambda _: "evaluator",
    start=_start,
)

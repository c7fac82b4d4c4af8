"""`gradus sft-evaluator`: evaluates the versions of a supervised run while they are made."""

from __future__ import annotations

from collections.abc import Sequence

from gradus.cli.role import Role, run_role
from gradus.config import SftEvaluatorProcessConfig


def run(words: Sequence[str]) -> int:
    """Run the process that the config describes."""
    return run_role(ROLE, words)


def _start(config: SftEvaluatorProcessConfig) -> None:
    from gradus.orchestrator.evaluation.sft_evaluator import run

    run(config)


ROLE = Role(
    command="sft-evaluator",
    model=SftEvaluatorProcessConfig,
    process=lambda _: "evaluator",
    start=_start,
)

"""What keeps a distilling algorithm from learning, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from gradus.config.algorithm import AlgorithmConfig
from gradus.config.problems import Problem
from gradus.config.schema import KeyPath

_SCORED = frozenset({"opd", "opsd"})
_UNSCORED = frozenset({"grpo", "max_rl", "hierarchical_grpo", "rae", "echo", "opsd", "sft"})


def reference_problems(
    path: KeyPath, algo: AlgorithmConfig, *, temperature: float | None, is_frozen: bool
) -> Iterator[Problem]:
    """Distilling algorithms without their model, or with one that they cannot be compared to."""
    if algo.type == "opd" and algo.reference is None:
        yield Problem(
            (*path, "reference"),
            "is missing; opd needs the base_url and the model of a frozen teacher",
        )
    if algo.type in _SCORED and temperature not in (None, 1.0):
        yield Problem(
            (*path, "type"),
            f"{algo.type} compares with logprobs at temperature 1, but sampling.temperature is "
            f"{temperature}; set it to 1.0",
        )
    if algo.type == "sft" and not is_frozen:
        yield Problem(
            (*path, "type"),
            "sft learns what a frozen model plays, but the policy plays this source; "
            "give its seats a model and a base_url under agents.<role>",
        )
    if algo.reference is not None and algo.type in _UNSCORED:
        yield Problem((*path, "reference"), f"{algo.type} asks no frozen model; remove it")

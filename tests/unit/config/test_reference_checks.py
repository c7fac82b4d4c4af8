from __future__ import annotations

import pytest

from gradus.config import AlgorithmConfig, ReferenceConfig
from gradus.config.sources import reference_problems

TEACHER = ReferenceConfig(base_url="http://127.0.0.1:8000", model="teacher")


@pytest.mark.parametrize(
    ("algo", "temperature", "is_frozen", "words"),
    [
        (AlgorithmConfig(type="opd"), 1.0, False, "opd needs the base_url"),
        (AlgorithmConfig(type="opd", reference=TEACHER), 0.7, False, "set it to 1.0"),
        (AlgorithmConfig(type="opsd"), 0.7, False, "set it to 1.0"),
        (AlgorithmConfig(type="sft"), 1.0, False, "the policy plays this source"),
        (AlgorithmConfig(type="grpo", reference=TEACHER), 1.0, False, "asks no frozen model"),
    ],
)
def test_a_combination_that_cannot_learn_is_refused(
    algo: AlgorithmConfig, temperature: float, is_frozen: bool, words: str
) -> None:
    (problem,) = reference_problems(("algo",), algo, temperature=temperature, is_frozen=is_frozen)
    assert words in problem.message


@pytest.mark.parametrize(
    ("algo", "is_frozen"),
    [
        (AlgorithmConfig(type="opd", reference=TEACHER), False),
        (AlgorithmConfig(type="opsd"), False),
        (AlgorithmConfig(type="sft"), True),
        (AlgorithmConfig(type="my.module:Algorithm", reference=TEACHER), False),
    ],
)
def test_a_combination_that_learns_passes(algo: AlgorithmConfig, is_frozen: bool) -> None:
    found = reference_problems(("algo",), algo, temperature=1.0, is_frozen=is_frozen)
    assert list(found) == []

"""Which algorithms learn from a frozen model, and what they need for it."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.testing.configs import build_run_config, contradictions_of

SERVER = {"base_url": "http://127.0.0.1:8000", "model": "teacher"}
FROZEN = {"solver": {"base_url": "http://127.0.0.1:8000/v1", "model": "teacher"}}


def messages(algo: dict[str, Any], temperature: float, agents: dict[str, Any]) -> list[str]:
    source = {"id": "reverse-text", "agents": agents}
    train = {"env": [source], "algo": algo, "sampling": {"temperature": temperature}}
    return [
        p.message for p in contradictions_of(build_run_config({"orchestrator": {"train": train}}))
    ]


@pytest.mark.parametrize(
    ("algo", "temperature", "words"),
    [
        ({"type": "opd"}, 1.0, "opd needs the base_url"),
        ({"type": "opd", "reference": SERVER}, 0.7, "set it to 1.0"),
        ({"type": "opsd"}, 0.7, "set it to 1.0"),
        ({"type": "sft"}, 1.0, "the policy plays this source"),
        ({"type": "grpo", "reference": SERVER}, 1.0, "asks no frozen model"),
    ],
)
def test_a_combination_that_cannot_learn_is_refused(
    algo: dict[str, Any], temperature: float, words: str
) -> None:
    (message,) = messages(algo, temperature, {})
    assert words in message


@pytest.mark.parametrize(
    ("algo", "agents"),
    [
        ({"type": "opd", "reference": SERVER}, {}),
        ({"type": "opsd"}, {}),
        ({"type": "sft"}, FROZEN),
        ({"type": "my.module:Algorithm", "reference": SERVER}, {}),
    ],
)
def test_a_combination_that_learns_passes(algo: dict[str, Any], agents: dict[str, Any]) -> None:
    assert messages(algo, 1.0, agents) == []

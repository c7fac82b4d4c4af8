"""Which algorithms learn from a frozen model, and what they need for it."""

from __future__ import annotations

from typing import Any

import pytest
from configs import build_run_config, contradictions_of

from gradus.config import resolve_sources
from gradus.config.sources import keeps_reference

SERVER = {"base_url": "http://127.0.0.1:8000", "model": "teacher"}
FROZEN = {"solver": {"base_url": "http://127.0.0.1:8000/v1", "model": "teacher"}}


def messages(
    algo: dict[str, Any],
    temperature: float,
    agents: dict[str, Any],
    loss: dict[str, Any] | None = None,
) -> list[str]:
    source = {"id": "reverse-text", "agents": agents}
    train = {"env": [source], "algo": algo, "sampling": {"temperature": temperature}}
    changes = {"orchestrator": {"train": train}, "trainer": {"loss": loss or {}}}
    return [problem.message for problem in contradictions_of(build_run_config(changes))]


@pytest.mark.parametrize(
    ("algo", "temperature", "words"),
    [
        ({"type": "opd"}, 1.0, "opd needs the base_url"),
        ({"type": "opd", "reference": SERVER}, 0.7, "set it to 1.0"),
        ({"type": "opsd"}, 0.7, "set it to 1.0"),
        ({"type": "sft"}, 1.0, "the policy plays this source"),
        ({"type": "grpo", "reference": SERVER}, 1.0, "set trainer.loss.reference_kl_coefficient"),
        ({"type": "opsd", "reference": SERVER}, 1.0, "opsd asks no frozen model; remove it"),
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


PULL = {"type": "ppo_clip", "reference_kl_coefficient": 0.05}


@pytest.mark.parametrize("algo", ["grpo", "max_rl", "hierarchical_grpo", "echo"])
@pytest.mark.parametrize("reference", [{}, {"reference": SERVER}])
def test_every_algorithm_with_advantages_takes_a_reference(
    algo: str, reference: dict[str, Any]
) -> None:
    assert messages({"type": algo, **reference}, 1.0, {}, PULL) == []


def test_only_the_initial_weights_are_scored_at_any_temperature() -> None:
    assert messages({"type": "grpo"}, 0.7, {}, PULL) == []
    (message,) = messages({"type": "grpo", "reference": SERVER}, 0.7, {}, PULL)
    assert "set it to 1.0, or remove this" in message


@pytest.mark.parametrize(
    ("algo", "loss"),
    [
        ({"type": "opd", "reference": SERVER}, {}),
        ({"type": "opsd"}, {}),
        ({"type": "grpo", "reference": SERVER}, PULL),
    ],
)
@pytest.mark.parametrize("place", ["taskset", "agent"])
def test_what_is_scored_at_temperature_one_lets_no_program_choose_another(
    algo: dict[str, Any], loss: dict[str, Any], place: str
) -> None:
    def found(sampling: str) -> list[str]:
        keys: dict[str, Any] = {"sampling": sampling}
        agent = {"harness": {"id": "program", "command": ["a"], **keys}}
        own = {"taskset": keys} if place == "taskset" else {"agent": agent}
        train = {"env": [{"id": "words", **own}], "algo": algo}
        changes = {"orchestrator": {"train": train}, "trainer": {"loss": loss}}
        return [problem.message for problem in contradictions_of(build_run_config(changes))]

    assert found("run") == []
    (message,) = found("program")
    assert "scored at temperature 1" in message


def test_a_program_that_chooses_goes_with_the_initial_weights() -> None:
    source = {"id": "words", "taskset": {"sampling": "program"}}
    train = {"env": [source], "algo": {"type": "grpo"}}
    changes = {"orchestrator": {"train": train}, "trainer": {"loss": PULL}}
    assert contradictions_of(build_run_config(changes)) == []


@pytest.mark.parametrize(
    ("algorithms", "loss", "is_kept"),
    [
        ([{"type": "grpo"}], {}, False),
        ([{"type": "grpo"}], PULL, True),
        ([{"type": "grpo", "reference": SERVER}], PULL, False),
        ([{"type": "grpo", "reference": SERVER}, {"type": "grpo"}], PULL, True),
        ([{"type": "opd", "reference": SERVER}, {"type": "opsd"}], PULL, False),
        ([{"type": "grpo"}], {"type": "my:Loss", "options": PULL}, True),
    ],
)
def test_the_trainer_keeps_the_initial_weights_unless_every_source_is_scored(
    algorithms: list[dict[str, Any]], loss: dict[str, Any], is_kept: bool
) -> None:
    sources = [{"id": "words", "name": f"w{i}", "algo": it} for i, it in enumerate(algorithms)]
    changes = {"orchestrator": {"train": {"env": sources}}, "trainer": {"loss": loss}}
    config = build_run_config(changes)
    assert keeps_reference(config, resolve_sources(config)) is is_kept


@pytest.mark.parametrize("renderer", ["default", {"name": "default", "tool_parser": "qwen3"}])
def test_echo_with_a_renderer_that_marks_no_bodies_is_refused(renderer: Any) -> None:
    algo = {"orchestrator": {"train": {"algo": {"type": "echo"}}}}
    (problem,) = contradictions_of(build_run_config({**algo, "model": {"renderer": renderer}}))
    assert "echo learns the bodies of messages" in problem.message
    assert contradictions_of(build_run_config({**algo, "model": {"renderer": "qwen3"}})) == []

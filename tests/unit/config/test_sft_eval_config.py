"""`[eval]` of `gradus sft`: what it refuses, and what each process is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import build_sft_config

from gradus.config import SftConfig, SftProcessConfig, resolve
from gradus.config.resolve import ProcessConfigs
from gradus.errors import ConfigError
from gradus.plan.machine import check
from gradus.plan.show import describe_config

CANARY = {"MY_KEY": "canary"}


def build_config(changes: dict[str, Any] | None = None, **section: Any) -> SftConfig:
    evaluation = {"env": [{"id": "reverse-text"}], **section}
    return build_sft_config({"eval": evaluation, **(changes or {})})


def resolved(config: SftConfig, **changes: Any) -> ProcessConfigs:
    return resolve(config, run_dir=Path("runs/x"), term=2, **changes)


def evaluator_of(config: SftConfig, **changes: Any) -> SftProcessConfig:
    evaluator = resolved(config, **changes).launched
    assert isinstance(evaluator, SftProcessConfig)
    return evaluator


def refusal(config: SftConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(config)
    return str(caught.value)


def test_without_an_evaluation_there_is_only_the_trainer() -> None:
    configs = resolved(build_sft_config())
    assert list(configs.by_process()) == ["trainer"]
    assert configs.env_vars == {"trainer": {}}


def test_an_evaluation_adds_the_engine_the_environments_and_who_plays() -> None:
    names = list(resolved(build_config()).by_process())
    assert names == ["inference", "eval_reverse-text", "trainer", "evaluator"]


def test_an_environment_with_an_address_is_not_started() -> None:
    others = {"agent": {"model": "m", "base_url": "http://x/v1"}}
    env = [{"id": "reverse-text", "address": "tcp://127.0.0.1:1/run", "agents": others}]
    assert "eval_reverse-text" not in resolved(build_config(env=env)).by_process()


def test_the_evaluator_knows_all_it_needs_and_inherits_sampling() -> None:
    env = [{"id": "reverse-text", "num_tasks": 3, "sampling": {"temperature": 0.0}}]
    config = build_config(env=env, sampling={"max_completion_tokens": 9}, interval_steps=7)
    evaluator = evaluator_of(config, resume_step=4)
    (source,) = evaluator.evaluation_sources
    sampling = source.sampling
    assert (source.num_tasks, sampling.temperature, sampling.max_completion_tokens) == (3, 0.0, 9)
    assert (evaluator.max_steps, evaluator.resume_step, evaluator.term) == (100, 4, 2)
    assert evaluator.eval is not None
    assert evaluator.eval.interval_steps == 7


def test_what_changes_an_episode_changes_the_identity() -> None:
    before = evaluator_of(build_config()).identity
    assert evaluator_of(build_config(sampling={"temperature": 0.5})).identity != before
    assert evaluator_of(build_config(interval_steps=3)).identity == before


def test_variables_reach_their_process_and_no_file() -> None:
    config = build_config(
        {"env_vars": CANARY, "inference": {"env_vars": CANARY}},
        env=[{"id": "reverse-text", "env_vars": CANARY}],
    )
    configs = resolved(config)
    assert set(configs.env_vars) == {"trainer", "inference", "eval_reverse-text"}
    assert all(variables == CANARY for variables in configs.env_vars.values())
    for process in configs.by_process().values():
        assert "canary" not in str(process.without_secrets())


@pytest.mark.parametrize(
    ("changes", "section", "text"),
    [
        ({}, {"env": [{"id": "a"}, {"id": "a"}]}, "eval.env.1.name: 'a' is already the name"),
        ({}, {"sampling": {"extra_body": {"n": 2}}}, "eval.sampling.extra_body.n: has another"),
        ({"inference": {"host": "0.0.0.0"}}, {}, "inference.host: '0.0.0.0' can be reached"),
        ({"inference": {"env_vars": {"1x": "y"}}}, {}, "inference.env_vars"),
        (
            {"max_steps": 5},
            {"interval_steps": 6, "base_model_first": False, "at_end": False},
            "eval.interval_steps: 6 is more than max_steps = 5",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    changes: dict[str, Any], section: dict[str, Any], text: str
) -> None:
    assert text in refusal(build_config(changes, **section))


def test_an_evaluation_needs_environments() -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        build_config(env=[])


def test_serving_is_not_looked_at_when_nothing_is_evaluated() -> None:
    resolved(build_sft_config({"inference": {"host": "0.0.0.0"}}))


def test_the_check_names_an_environment_that_is_not_installed() -> None:
    problems = [str(problem) for problem in check(build_config(env=[{"id": "no-such-one"}]))]
    assert any(
        problem.startswith("eval.env.0.id: environment 'no-such-one'") for problem in problems
    )


def test_the_plan_for_a_person_says_what_is_evaluated_and_when() -> None:
    config = build_config(env=[{"id": "reverse-text", "num_tasks": 8, "group_size": 2}])
    text = "\n".join(describe_config(config))
    assert "8 tasks of reverse-text x 2 (temperature 1), every 20 steps" in text
    assert "eval_reverse-text" in text
    assert "vLLM, auto" in text

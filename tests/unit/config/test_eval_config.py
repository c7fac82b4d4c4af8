"""The config of `gradus eval`: what it refuses, and what each process is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import contradictions_of

from gradus.config import EvalConfig, resolve, run_name
from gradus.config.schema.environment import RETRIED_ERRORS
from gradus.errors import ConfigError
from gradus.run.settings import continued_identity

ENDPOINT = {"base_url": "http://127.0.0.1:9/v1", "api_key_var": "SERVICE_KEY"}


def build_eval_config(**changes: Any) -> EvalConfig:
    values = {"model": {"name": "someone/tiny"}, "env": [{"id": "reverse-text"}]}
    config: EvalConfig = EvalConfig.model_validate(values | changes)
    return config


def resolved(config: EvalConfig) -> Any:
    return resolve(config, run_dir=Path("runs/x"), term=2)


def test_a_model_directory_is_served_for_the_time_of_the_evaluation() -> None:
    names = list(resolved(build_eval_config()).by_process())
    assert names == ["inference", "eval_reverse-text", "evaluator"]


def test_an_endpoint_is_asked_and_nothing_is_served() -> None:
    configs = resolved(build_eval_config(**ENDPOINT))
    assert list(configs.by_process()) == ["eval_reverse-text", "evaluator"]
    assert configs.launched.base_url == ENDPOINT["base_url"]


def test_only_the_name_of_the_key_s_variable_is_in_the_configs() -> None:
    (environment,) = resolved(build_eval_config(**ENDPOINT)).environments
    assert environment.env_var_names == ["SERVICE_KEY"]
    assert environment.inherited_env == [], "no program of the environment sees the key"


def test_environments_inherit_the_shared_sampling() -> None:
    env = [{"id": "reverse-text", "sampling": {"temperature": 0.2}}]
    config = build_eval_config(env=env, sampling={"max_completion_tokens": 99})
    (source,) = resolved(config).launched.evaluation_sources
    sampling = source.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_completion_tokens) == (0.2, 1.0, 99)


def test_a_gpu_is_shared_with_no_trainer_that_is_not_there() -> None:
    (told,) = contradictions_of(build_eval_config(inference={"gpu_sharing": "turns"}))
    assert "an evaluation has no trainer that could share" in told.message


def test_an_evaluation_may_be_greedy() -> None:
    config = build_eval_config(sampling={"temperature": 0, "max_completion_tokens": 9})
    assert contradictions_of(config) == []
    (source,) = resolved(config).launched.evaluation_sources
    assert source.sampling.temperature == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "someone/other"}},
        {"sampling": {"temperature": 0.1}},
        ENDPOINT,
        {"env": [{"id": "reverse-text", "taskset": {"seed": 1}}]},
        {"env": [{"id": "reverse-text", "agent": {"max_turns": 2}}]},
    ],
)
def test_what_changes_an_episode_changes_the_identity(changes: dict[str, Any]) -> None:
    before = resolved(build_eval_config()).launched.identity
    assert resolved(build_eval_config(**changes)).launched.identity != before


def test_headers_of_tasks_belong_to_the_identity() -> None:
    source = {"id": "reverse-text", "agents": {"agent": {"model": "m", **ENDPOINT}}}
    before = resolved(build_eval_config(env=[source])).launched.identity
    sent = {**source, "headers_from": "routing"}
    assert resolved(build_eval_config(env=[sent])).launched.identity != before


@pytest.mark.parametrize(
    ("was", "now", "noted"),
    [
        ({}, {"model.safetensors": "a"}, {"model.safetensors": "a"}),
        ({"model.safetensors": "a"}, {}, {"model.safetensors": "a"}),
        ({}, {}, {}),
    ],
)
def test_digests_that_one_side_does_not_know_are_taken_from_the_other(
    was: dict[str, str], now: dict[str, str], noted: dict[str, str]
) -> None:
    identity = resolved(build_eval_config()).launched.identity
    continued = continued_identity(identity | {"files": was}, identity | {"files": now})
    assert continued == identity | {"files": noted}


def test_sources_that_are_not_evaluated_this_time_stay_noted() -> None:
    identity = resolved(build_eval_config()).launched.identity
    other = {"other": {"environment": {}, "sampling": {}, "unmeasured_agents": []}}
    before = identity | {"sources": identity["sources"] | other}
    assert continued_identity(before, identity)["sources"] == before["sources"]


def test_more_tasks_and_more_speed_leave_the_identity() -> None:
    before = resolved(build_eval_config()).launched.identity
    env = [{"id": "reverse-text", "num_tasks": 9, "group_size": 4}]
    after = build_eval_config(env=env, max_in_flight_episodes=1, max_retries=0)
    assert resolved(after).launched.identity == before


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"api_key_var": "KEY"}, "api_key_var", "base_url"),
        (
            ENDPOINT | {"api_key_var": "sk-live-secret"},
            "api_key_var",
            "is not a name of an environment variable",
        ),
        ({"env": [{"id": "a"}, {"id": "a"}]}, "env.1.name", "already the name of source 0"),
        ({"sampling": {"extra_body": {"n": 4}}}, "sampling.extra_body.n", "write group_size"),
        ({"inference": {"host": "0.0.0.0"}}, "inference.host", "can be reached by others"),
    ],
)
def test_contradictions_are_named_with_their_key(
    changes: dict[str, Any], key: str, text: str
) -> None:
    (problem,) = contradictions_of(build_eval_config(**changes))
    assert str(problem).startswith(f"{key}: ")
    assert text in str(problem)
    with pytest.raises(ConfigError):
        resolved(build_eval_config(**changes))


def test_a_key_that_was_written_instead_of_its_variable_is_not_repeated() -> None:
    (problem,) = contradictions_of(
        build_eval_config(**ENDPOINT | {"api_key_var": "sk-live-secret"})
    )
    assert "secret" not in str(problem)


def test_the_context_of_a_foreign_endpoint_is_not_ours_to_check() -> None:
    sampling = {"max_completion_tokens": 100_000}
    assert contradictions_of(build_eval_config(**ENDPOINT, sampling=sampling)) == []


def test_an_evaluation_is_named_after_its_environments_and_its_model() -> None:
    assert run_name(build_eval_config(), "0123abcd") == "reverse-text--tiny--0123abcd"


def test_a_foreign_opponent_and_a_judge_are_not_measured() -> None:
    opponent = {"model": "big", "base_url": "http://127.0.0.1:9/v1"}
    agents = {"first": {}, "second": opponent}
    configs = resolved(build_eval_config(env=[{"id": "kuhn-poker", "agents": agents}]))
    (source,) = configs.launched.evaluation_sources
    assert source.unmeasured_agents == ["judge", "second"]


def test_a_source_s_own_error_policy_holds_in_an_evaluation_too() -> None:
    own = {"retry_on": ["TaskError"], "backoff_seconds": 3.0}
    env = [
        {"id": "words", "name": "a", "errors": own},
        {"id": "words", "name": "b", "errors": {"retries": 5}},
    ]
    sources = resolved(build_eval_config(env=env, max_retries=1)).launched.evaluation_sources
    found = [(s.errors.retry_on, s.errors.retries, s.errors.backoff_seconds) for s in sources]
    assert found == [(["TaskError"], 1, 3.0), (list(RETRIED_ERRORS), 5, 1.0)]

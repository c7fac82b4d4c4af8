"""What the config promises about other packages, which it may not import, holds in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import build_run_config

from gradus.config import EnvironmentProcessConfig, resolve
from gradus.config.check import env_vars_problems
from gradus.config.owned import OWNED_ENGINE_ARGS, RESERVED
from gradus.environments.roles import complete_roles
from gradus.inference.settings import (
    CLEARED_VARIABLES,
    engine_settings,
    process_environment,
)
from gradus.processes.child import DEATH_PIPE_VARIABLE, LAUNCH_VARIABLE


def environment_process(source: dict[str, object]) -> EnvironmentProcessConfig:
    config = build_run_config({"orchestrator": {"train": {"env": [source]}}})
    return resolve(config, run_dir=Path("runs/x"), term=0).environments[0]


def test_every_engine_argument_that_gradus_sets_has_an_owner_in_the_config() -> None:
    config = build_run_config({"inference": {"dtype": "float32"}})
    configs = resolve(config, run_dir=Path("runs/x"), term=0)
    set_by_gradus = set(engine_settings(configs.inference[0], available_bytes=1))
    quiet = {name for name in set_by_gradus if name.startswith(("disable_", "enable_log"))}
    assert set_by_gradus - quiet <= set(OWNED_ENGINE_ARGS)


def test_every_variable_that_the_engine_cannot_keep_is_refused() -> None:
    configs = resolve(build_run_config(), run_dir=Path("runs/x"), term=0)
    names = process_environment(configs.inference[0], {}, is_cpu=True, num_cores=2)
    user = dict.fromkeys(names, "chosen by the user")
    environment = process_environment(configs.inference[0], user, is_cpu=True, num_cores=2)
    fixed = {name for name, value in environment.items() if value != user[name]}
    assert fixed | set(CLEARED_VARIABLES) <= set(RESERVED["inference"])


@pytest.mark.parametrize("role", list(RESERVED))
@pytest.mark.parametrize("name", [DEATH_PIPE_VARIABLE, LAUNCH_VARIABLE, "GRADUS_INFERENCE_TOKEN"])
def test_variables_between_our_own_processes_are_refused(role: str, name: str) -> None:
    assert len(list(env_vars_problems(role, (role, "env_vars"), {name: "x"}))) == 1
    assert list(env_vars_problems(role, (role, "env_vars"), {"MINE": "x"})) == []


def test_verifiers_accepts_the_environment_config_of_a_single_seat() -> None:
    from verifiers.v1.utils.loaders import resolve_env_config

    source = {
        "id": "gradus-reverse-text",
        "agent": {
            "max_turns": 2,
            "max_total_tokens": 100,
            "timeout": {"setup": None, "rollout": 5.0},
        },
    }
    config = resolve_env_config(complete_roles("s", environment_process(source).verifiers))
    assert config.taskset.id == "gradus-reverse-text"
    assert config.timeout.episode == 900.0
    assert config.agent.harness.id == "gradus_chat"
    assert config.agent.runtime.type == "subprocess"
    assert (config.agent.max_turns, config.agent.max_total_tokens) == (2, 100)
    assert (config.agent.timeout.setup, config.agent.timeout.rollout) == (None, 5.0)


def test_another_model_is_not_asked_for_the_prefix_cache_of_the_policy() -> None:
    """Only vLLM knows `cache_salt`; other providers refuse a request with it."""
    from verifiers.v1.configs.agent import resolve_agent
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils.loaders import resolve_env_config

    judge = {"model": "big", "base_url": "http://localhost:1/v1", "sampling": {"temperature": 0.1}}
    source = {
        "id": "agentic-judge",
        "taskset": {"id": "gradus-reverse-text"},
        "agents": {"solver": {}, "judge": judge},
    }
    config = resolve_env_config(complete_roles("s", environment_process(source).verifiers))
    asked = SamplingConfig(temperature=1.0, max_tokens=9, seed=5, cache_salt="v3")
    told = {
        role: resolve_agent(getattr(config, role), sampling=asked).sampling.model_dump(
            exclude_none=True
        )
        for role in ("solver", "judge")
    }
    policy = {"temperature": 1.0, "max_tokens": 9, "seed": 5, "cache_salt": "v3"}
    assert told["solver"] == policy
    assert told["judge"] == {"temperature": 0.1, "max_tokens": 9, "seed": 5}


def test_verifiers_accepts_the_environment_config_of_several_roles() -> None:
    from verifiers.v1.utils.loaders import resolve_env_config

    judge = {
        "harness": {"id": "null"},
        "model": "big",
        "base_url": "http://localhost:1/v1",
        "sampling": {"temperature": 0.1, "max_completion_tokens": 9, "extra_body": {"min_p": 0.1}},
    }
    source = {
        "id": "agentic-judge",
        "taskset": {"id": "gradus-reverse-text"},
        "agents": {"solver": {}, "judge": judge},
    }
    config = resolve_env_config(complete_roles("s", environment_process(source).verifiers))
    assert (config.id, config.taskset.id) == ("agentic-judge", "gradus-reverse-text")
    assert config.solver.harness.id == "gradus_chat"
    assert config.judge.harness.id == "null"
    assert config.judge.client.base_url == "http://localhost:1/v1"
    assert config.judge.sampling.model_dump(exclude_unset=True)["max_tokens"] == 9

"""One config becomes the configs of all processes, with nothing left to look up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from configs import build_algorithm_config, build_run_config, build_sft_config
from pydantic import ValidationError

from gradus.config import EVERY_ROLE, NO_KEY_VARIABLE, SourceConfig, resolve, run_name
from gradus.config.resolve import ProcessConfigs, verifiers_config
from gradus.config.schema.environment import NAME_PATTERN, TrainEnvironmentConfig
from gradus.errors import ConfigError

RUN_DIR = Path("runs/demo")


def resolved(changes: dict[str, Any] | None = None) -> ProcessConfigs:
    return resolve(build_run_config(changes), run_dir=RUN_DIR, term=3)


def with_env(*sources: dict[str, Any], **train: Any) -> dict[str, Any]:
    entries = [{"id": "gradus-reverse-text", **source} for source in sources]
    return {"orchestrator": {"train": {"env": entries, **train}}}


def only_source(changes: dict[str, Any]) -> SourceConfig:
    (source,) = resolved(changes).launched.sources
    return source


def verifiers(**source: Any) -> dict[str, Any]:
    values = {"id": "gradus-reverse-text", **source}
    return verifiers_config(TrainEnvironmentConfig.model_validate(values))


def test_processes_stand_in_starting_order() -> None:
    configs = resolved(with_env({"name": "a"}, {"name": "b"}))
    assert list(configs.by_process()) == [
        "inference",
        "env_a",
        "env_b",
        "trainer",
        "orchestrator",
    ]


def test_every_process_knows_the_run_directory_and_the_term() -> None:
    for config in resolved().by_process().values():
        assert config.model_dump()["run_dir"] == "runs/demo"
        assert config.model_dump()["term"] == 3


def test_shared_values_reach_every_process_that_needs_them() -> None:
    configs = resolved(
        {
            "seed": 7,
            "model": {"name": "someone/tiny", "max_length_tokens": 1024},
            "trainer": {"num_processes": 2, "micro_batch_tokens": 4096},
        }
    )
    lengths = {part.model.max_length_tokens for part in (configs.inference[0], configs.launched)}
    assert lengths == {1024}
    assert {configs.inference[0].seed, configs.launched.seed} == {7}
    assert configs.launched.data_parallel_size == 2
    assert configs.launched.trainer.micro_batch_tokens == 4096
    assert configs.launched.max_steps == 20


def test_a_source_with_an_address_gets_no_process() -> None:
    changes = with_env({"name": "b"})
    others = {"agent": {"model": "m", "base_url": "http://x/v1"}}
    elsewhere = {"id": "mine", "address": "tcp://10.0.0.1:5000/run", "agents": others}
    changes["orchestrator"]["eval"] = {"env": [elsewhere], "interval_steps": 5}
    configs = resolved(changes)
    assert [environment.name for environment in configs.environments] == ["b"]
    (measured,) = configs.launched.evaluation_sources
    assert measured.address == "tcp://10.0.0.1:5000/run"


def test_a_source_inherits_what_it_leaves_open() -> None:
    source = only_source(
        with_env(
            {"sampling": {"temperature": 0.5, "extra_body": {"a": 3}}},
            sampling={
                "temperature": 1.0,
                "max_completion_tokens": 99,
                "extra_body": {"a": 9, "b": 0.1},
            },
            algo={"type": "grpo", "scale_by_std": True},
        )
    )
    assert source.sampling.model_dump() == {
        "temperature": 0.5,
        "top_p": 1.0,
        "max_completion_tokens": 99,
        "extra_body": {"a": 3, "b": 0.1},
    }
    assert source.algo == build_algorithm_config("grpo", scale_by_std=True)


def test_a_source_is_complete_without_any_setting() -> None:
    source = only_source(with_env({}))
    assert None not in source.sampling.model_dump().values()
    assert source.algo.type == "grpo"
    assert source.name == "gradus-reverse-text"


def test_a_source_may_have_its_own_algorithm() -> None:
    own = {"type": "my.module:Mine", "options": {"a": 1}, "scoring_timeout_seconds": 60.0}
    assert only_source(with_env({"algo": own})).algo.model_dump(exclude_none=True) == own


def test_a_setting_of_a_task_set_reaches_its_process_whatever_it_is_called() -> None:
    (process,) = resolved(with_env({"taskset": {"env_vars": {"A": "1"}}})).environments
    assert process.without_secrets()["verifiers"]["taskset"]["env_vars"] == {"A": "1"}


def test_variables_go_to_the_launcher_and_into_no_file() -> None:
    secret = {"env_vars": {"MY_KEY": "canary"}}
    changes = with_env(secret)
    changes["orchestrator"].update(secret)
    configs = resolved({**changes, "trainer": secret, "inference": secret})
    assert "canary" not in str([it.without_secrets() for it in configs.by_process().values()])
    assert configs.env_vars == {
        "inference": {"MY_KEY": "canary"},
        "env_gradus-reverse-text": {"MY_KEY": "canary"},
        "trainer": {"MY_KEY": "canary"},
        "orchestrator": {"MY_KEY": "canary"},
    }
    assert configs.environments[0].env_var_names == ["MY_KEY"]


def test_programs_inherit_what_the_config_sets_and_nothing_that_it_passes_by_name() -> None:
    source = {"env_vars": {"MODE": "x"}, "pass_env": ["MY_KEY", "HTTPS_PROXY", "MODE"]}
    (process,) = resolved(with_env(source)).environments
    assert process.env_var_names == ["HTTPS_PROXY", "MODE", "MY_KEY"]
    assert process.passed_env == ["HTTPS_PROXY", "MY_KEY"]
    assert process.inherited_env == ["HTTPS_PROXY", "MODE"]


def test_contradicting_sections_are_refused() -> None:
    with pytest.raises(ConfigError, match="already the name of source 0"):
        resolved(with_env({}, {}))


def test_a_single_seat_gets_the_settings_of_the_source() -> None:
    limits = {
        "max_turns": 3,
        "max_input_tokens": 10,
        "max_output_tokens": 20,
        "max_total_tokens": 30,
    }
    config = verifiers(
        taskset={"split": "train"},
        agent={**limits, "timeout": {"setup": 1.0, "rollout": 2.0}},
        timeout={"episode_seconds": 9.0},
    )
    assert config == {
        "taskset": {"id": "gradus-reverse-text", "split": "train"},
        "timeout": {"episode": 9.0, "finalize": 60.0},
        EVERY_ROLE: {
            "seat": {
                "harness": {"id": "gradus_chat"},
                "runtime": {"type": "subprocess"},
                **limits,
                "timeout": {"setup": 1.0, "rollout": 2.0, "finalize": 60.0, "scoring": 120.0},
            },
            "written": {**limits, "timeout": {"setup": 1.0, "rollout": 2.0}},
            "roles": {},
        },
    }


def test_another_harness_is_passed_on_with_its_settings() -> None:
    harness = {"id": "bash", "tool_timeout": 5.0}
    assert verifiers(agent={"harness": harness})[EVERY_ROLE]["seat"]["harness"] == {
        "id": "bash",
        "tool_timeout": 5.0,
    }


def test_an_environment_can_play_another_taskset() -> None:
    config = verifiers(id="best-of-n", taskset={"id": "gradus-reverse-text"})
    assert (config["id"], config["taskset"]) == ("best-of-n", {"id": "gradus-reverse-text"})


def test_a_role_holds_only_what_is_written_for_it() -> None:
    config = verifiers(
        agent={"max_turns": 5},
        agents={
            "solver": {},
            "judge": {
                "harness": {"id": "null"},
                "max_turns": 1,
                "runtime": {"type": "docker"},
                "timeout": {"rollout": 3.0},
                "model": "big",
                "base_url": "http://localhost:1/v1",
                "api_key_var": "BIG_KEY",
                "sampling": {
                    "temperature": 0.1,
                    "max_completion_tokens": 9,
                    "extra_body": {"k": 1},
                },
            },
        },
    )
    assert not {"agent", "solver", "judge"} & config.keys()
    roles = config[EVERY_ROLE]["roles"]
    assert roles["solver"] == {}
    assert roles["judge"] == {
        "harness": {"id": "null"},
        "max_turns": 1,
        "runtime": {"type": "docker"},
        "timeout": {"rollout": 3.0},
        "model": "big",
        "client": {
            "type": "eval",
            "base_url": "http://localhost:1/v1",
            "api_key_var": "BIG_KEY",
        },
        "sampling": {"cache_salt": None, "temperature": 0.1, "max_tokens": 9, "k": 1},
    }


def test_an_endpoint_without_a_key_never_gets_the_key_of_another_service() -> None:
    role = {"model": "m", "base_url": "http://localhost:1/v1"}
    judge = verifiers(agents={"judge": role})[EVERY_ROLE]["roles"]["judge"]
    assert judge["client"]["api_key_var"] == NO_KEY_VARIABLE


def test_process_configs_are_json() -> None:
    for config in resolved().by_process().values():
        assert type(config).model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "gradus-reverse-text--tiny--0123abcd"),
        ({"name": "mine"}, "mine"),
        ({"model": {"name": "runs/x/model"}}, "gradus-reverse-text--model--0123abcd"),
        ({"model": {"name": "org/big model"}}, "gradus-reverse-text--big-model--0123abcd"),
        (with_env({"name": "a"}, {"name": "b"}), "a_b--tiny--0123abcd"),
        ({"model": {"name": "/"}}, "gradus-reverse-text--x--0123abcd"),
    ],
)
def test_name_of_a_run(changes: dict[str, Any], name: str) -> None:
    assert run_name(build_run_config(changes), "0123abcd") == name


def test_a_long_name_is_cut_to_a_valid_one() -> None:
    sources = [{"name": f"environment-number-{number}"} for number in range(9)]
    config = build_run_config({**with_env(*sources), "model": {"name": "m" * 300}})
    assert re.fullmatch(NAME_PATTERN, run_name(config, "0123abcd"))


def test_supervised_run_keeps_its_config_and_drops_variables() -> None:
    config = build_sft_config({"env_vars": {"MY_KEY": "canary"}, "max_steps": 5})
    process = resolve(config, run_dir=RUN_DIR, term=2).launched
    assert (process.max_steps, process.term, process.run_dir) == (5, 2, "runs/demo")
    assert process.without_secrets()["env_vars"] == {}


def test_supervised_run_is_named_after_data_and_model() -> None:
    config = build_sft_config({"data": {"path": "data/warm_up.jsonl"}})
    assert run_name(config, "0123abcd") == "warm_up--tiny--0123abcd"


def test_supervised_run_with_contradictions_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold the longest sample"):
        resolve(build_sft_config({"micro_batch_tokens": 8}), run_dir=RUN_DIR, term=0)


@pytest.mark.parametrize(
    ("lora", "rank"),
    [(None, None), ({"rank": 4}, 4), ({"rank": 4, "serve": "merged"}, None)],
)
def test_inference_makes_room_for_adapters_that_are_served_as_such(
    lora: dict[str, Any] | None, rank: int | None
) -> None:
    config = build_run_config({"trainer": {"lora": lora}})
    assert resolve(config, run_dir=RUN_DIR, term=1).inference[0].lora_rank == rank


def test_a_source_is_frozen_where_all_that_is_named_is_played_by_others_and_trains() -> None:
    other = {"model": "judge", "base_url": "http://127.0.0.1:1"}
    taught = {"algo": {"type": "sft"}}
    configs = resolved(
        with_env(
            {"name": "a", "agents": {"solver": other}, **taught},
            {"name": "b", "agents": {"solver": {}, "judge": other}},
            {"name": "c"},
            {"name": "d", "agents": {"opponent": other}},
            {"name": "e", "agents": {"opponent": {**other, "train": True}}},
        )
    )
    sources = configs.launched.sources
    assert [source.is_frozen for source in sources] == [True, False, False, False, True]
    assert sources[0].untrained_agents == ["judge"]
    # Who is not named is the policy, so what the named opponent plays is not data.
    assert sources[3].untrained_agents == ["judge", "opponent"]


EVALUATED = {"env": [{"id": "gradus-reverse-text", "num_tasks": 5, "group_size": 4}]}


def resolve_evaluated(**changes: Any) -> Any:
    train = {"sampling": {"temperature": 0.7, "max_completion_tokens": 64}}
    orchestrator = {"train": train, "eval": EVALUATED | changes.pop("eval", {}), **changes}
    config = build_run_config({"orchestrator": orchestrator})
    return resolve(config, run_dir=Path("runs/x"), term=1)


def test_an_evaluated_environment_has_a_process_of_its_own_beside_the_same_train_source() -> None:
    configs = resolve_evaluated()
    names = list(configs.by_process())
    assert names[1:3] == ["env_gradus-reverse-text", "eval_gradus-reverse-text"]
    assert [config.purpose for config in configs.environments] == ["train", "eval"]


def test_an_evaluated_environment_inherits_what_training_samples_with() -> None:
    configs = resolve_evaluated(eval={"sampling": {"temperature": 0.2}})
    (source,) = configs.launched.evaluation_sources
    assert (source.num_tasks, source.group_size) == (5, 4)
    assert (source.sampling.temperature, source.sampling.max_completion_tokens) == (0.2, 64)


def test_secrets_of_an_evaluated_environment_stay_out_of_the_process_configs() -> None:
    env = [{"id": "gradus-reverse-text", "env_vars": {"MY_KEY": "canary"}}]
    configs = resolve_evaluated(eval={"env": env})
    assert "canary" not in str([it.without_secrets() for it in configs.by_process().values()])
    assert configs.env_vars["eval_gradus-reverse-text"] == {"MY_KEY": "canary"}


def test_the_version_that_is_served_while_an_evaluation_holds_others_stays_on_disk() -> None:
    """With `max_lag` + 1 batches of it the trainer makes as many versions meanwhile."""
    assert resolve_evaluated(max_lag=0).launched.keep_published == 2
    assert resolve_evaluated(max_lag=4).launched.keep_published == 6


def test_an_evaluation_may_not_outlast_the_patience_of_the_trainer() -> None:
    with pytest.raises(ValidationError, match="less than 86400"):
        resolve_evaluated(eval={"timeout_seconds": 86_400.0})


@pytest.mark.parametrize(
    ("agents", "untrained"),
    [
        ({}, ["judge"]),
        ({"judge": {"train": True}, "a": {}}, []),
        ({"a": {"train": False}, "b": {"train": True}}, ["a", "judge"]),
        ({"a": {}, "b": {"model": "m", "base_url": "http://x/v1"}}, ["b", "judge"]),
        ({"b": {"model": "m", "base_url": "http://x/v1"}}, ["b", "judge"]),
        ({"b": {"model": "m", "base_url": "http://x/v1", "train": True}}, ["judge"]),
    ],
)
def test_a_judge_and_roles_of_other_models_do_not_train_unless_asked(
    agents: dict[str, Any], untrained: list[str]
) -> None:
    values = {"orchestrator": {"train": {"env": [{"id": "a", "agents": agents}]}}}
    configs = resolve(build_run_config(values), run_dir=Path("runs/x"), term=0)
    assert configs.launched.sources[0].untrained_agents == untrained


def test_the_environment_process_knows_what_learns_from_its_episodes() -> None:
    judged = {"id": "debate", "algo": {"type": "rae"}, "agents": {"first": {}, "judge": {}}}
    measured = {"interval_steps": 1, "env": [{"id": "gradus-reverse-text", "num_tasks": 2}]}
    train = {"env": [{"id": "gradus-reverse-text"}, judged]}
    config = build_run_config({"orchestrator": {"train": train, "eval": measured}})
    plain, debate, evaluated = resolve(config, run_dir=Path("r"), term=1).environments
    assert plain.algo == config.orchestrator.train.algo
    assert debate.algo is not None
    assert (debate.algo.type, debate.untrained_agents) == ("rae", ["judge"])
    assert (evaluated.purpose, evaluated.algo, evaluated.untrained_agents) == ("eval", None, [])


def test_settings_of_the_environment_stand_beside_its_roles() -> None:
    config = verifiers(settings={"n": 4, "max_concurrent_agents": 2})
    assert (config["n"], config["max_concurrent_agents"]) == (4, 2)

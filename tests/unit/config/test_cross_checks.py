"""Where conflicts between sections begin, on both sides of each border."""

from __future__ import annotations

from typing import Any

import pytest
from configs import (
    build_algorithm_config,
    build_run_config,
    build_run_values,
    build_sft_config,
    contradictions_of,
)
from pydantic import ValidationError

from gradus.config import RunConfig, SamplingConfig, resolve_sources
from gradus.config.check import env_vars_problems
from gradus.config.owned import RESERVED
from gradus.config.problems import validation_problems
from gradus.config.schema.base import MAX_SEED
from gradus.config.sources import DEFAULT_SAMPLING, merged_sampling
from gradus.run.settings import planned_steps


def keys(changes: dict[str, Any]) -> list[str]:
    """The keys that are refused, by themselves or for another one, without what is said of them."""
    values = build_run_values(changes)
    try:
        problems = contradictions_of(RunConfig.model_validate(values))
    except ValidationError as error:
        problems = validation_problems(error, RunConfig, values)
    return [".".join(map(str, problem.path)) for problem in problems]


def test_a_run_without_max_steps_goes_on_until_it_is_stopped() -> None:
    values = build_run_values()
    del values["max_steps"]
    config = RunConfig.model_validate(values)
    assert planned_steps(config.max_steps) is None
    assert list(contradictions_of(config)) == []
    optimizer = {"optimizer": {"schedule": "cosine"}}
    config = RunConfig.model_validate({**values, "trainer": optimizer})
    assert [it.path for it in contradictions_of(config)] == [("trainer", "optimizer", "schedule")]


def with_env(**source: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"env": [{"id": "reverse-text", **source}]}}}


def measured_elsewhere(**source: Any) -> dict[str, Any]:
    """An evaluation by a server that the user runs."""
    agents = {"agent": {"model": "m", "base_url": "http://x/v1"}}
    own = {"id": "reverse-text", "name": "held-out", "agents": agents}
    env = [{**own, "address": "ipc:///x/run", **source}]
    return orchestrator(eval={"env": env, "interval_steps": 5})


def held_out(train: dict[str, Any], measured: dict[str, Any], **source: Any) -> dict[str, Any]:
    """Training and an evaluation on two sides of a task set, each with its settings."""
    by = {"holdout_by": source.pop("holdout_by", None), "holdout_fraction": 0.2}
    other = {**by, "side": "held_out", **source.pop("tasks", {})}
    env = [{**source, "name": "b", "taskset": measured, "tasks": other}]
    return {
        "orchestrator": {
            "train": {"env": [{**source, "name": "a", "taskset": train, "tasks": by}]},
            "eval": {"env": env, "interval_steps": 5},
        }
    }


def two_tables(train: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Training and an evaluation whose task sets hold tasks out themselves."""
    env = [{"id": "gpqa-rlvr", "name": "b", "taskset": measured}]
    train_env = [{"id": "gpqa-rlvr", "name": "a", "taskset": train}]
    return {
        "orchestrator": {"train": {"env": train_env}, "eval": {"env": env, "interval_steps": 5}}
    }


def with_sampling(**sampling: Any) -> dict[str, Any]:
    return with_env(sampling=sampling)


def orchestrator(**values: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"env": [{"id": "reverse-text"}]}, **values}}


def optimizer(**values: Any) -> dict[str, Any]:
    return {"trainer": {"optimizer": values}}


def loss(**values: Any) -> dict[str, Any]:
    return {"trainer": {"loss": values}}


def prometheus(**values: Any) -> dict[str, Any]:
    return {"monitor": [{"type": "prometheus", **values}]}


ENV = "orchestrator.train.env.0"
RARE = {
    "env": [{"id": "reverse-text", "name": "held-out"}],
    "interval_steps": 100,
    "base_model_first": False,
}
FIFTH = {"holdout_fraction": 0.2}
EVAL = {"env": [{"id": "reverse-text", "name": "held-out"}], "interval_steps": 5}
BORDERS = [
    (
        held_out({"path": "a", "reward": "r.py:f"}, {"path": "a"}, id="jsonl"),
        held_out({"path": "a"}, {"path": "b"}, id="jsonl"),
        "orchestrator.eval.env.0.taskset",
    ),
    (
        held_out({"num_tasks": 9}, {"num_tasks": 5}, id="zebra"),
        held_out({"num_tasks": 9}, {"num_tasks": 5}, id="reasoning-gym"),
        "orchestrator.eval.env.0.taskset",
    ),
    *(
        (
            held_out({}, {}, id="zebra", tasks={"holdout_fraction": 0.1}),
            held_out({}, {}, id="zebra", tasks={key: value}),
            f"orchestrator.eval.env.0.tasks.{key}",
        )
        for key, value in (("holdout_fraction", 0.3), ("holdout_seed", 1), ("holdout_by", "prompt"))
    ),
    *(
        (
            two_tables(trained, {**fits, "side": "held_out"}),
            two_tables(trained, {**leaks, "side": "held_out"}),
            f"orchestrator.eval.env.0.taskset.{key}",
        )
        for key, trained, fits, leaks in (
            ("holdout_fraction", {"holdout_fraction": "0.2"}, FIFTH, {"holdout_fraction": 0.3}),
            ("holdout_fraction", {"level": 1}, {"level": 2, **FIFTH}, {"level": 1, **FIFTH}),
            ("holdout_fraction", FIFTH, {"level": 1, **FIFTH}, {"level": 1}),
            ("holdout_seed", {"holdout_seed": 0}, {}, {"holdout_seed": 2}),
            (
                "holdout_seed",
                {"split": "a"},
                {"split": "b", "holdout_seed": 2},
                {"split": "a", "holdout_seed": 2},
            ),
        )
    ),
    (
        held_out({}, {"level": 5}, id="zebra", holdout_by="prompt"),
        held_out(
            {}, {"level": 5}, id="zebra", holdout_by="prompt", tasks={"holdout_fraction": 0.3}
        ),
        "orchestrator.eval.env.0.tasks.holdout_fraction",
    ),
    (
        held_out({"path": "./a"}, {"path": "a", "task": {"seconds": 5.0}}, id="jsonl"),
        held_out({"path": "./a"}, {"path": "a", "order": 1}, id="jsonl"),
        "orchestrator.eval.env.0.taskset",
    ),
    (
        held_out({"level": 1}, {"level": 2}, id="zebra", holdout_by="prompt"),
        held_out({"level": 1}, {}, id="zebra"),
        "orchestrator.eval.env.0.taskset",
    ),
    ({"seed": MAX_SEED}, {"seed": MAX_SEED + 1}, "seed"),
    (
        {"checkpoint": {"interval_steps": 5, "keep_interval_steps": 10}},
        {"checkpoint": {"interval_steps": 5, "keep_interval_steps": 12}},
        "checkpoint.keep_interval_steps",
    ),
    (
        {"checkpoint": {"interval_steps": 10, "keep_interval_steps": 10}},
        {"checkpoint": {"keep_interval_steps": 10}},
        "checkpoint.keep_interval_steps",
    ),
    (orchestrator(max_lag=8), orchestrator(max_lag=9), "orchestrator.max_lag"),
    (
        with_env(tasks={"side": "held_out", "holdout_fraction": 0.1}),
        with_env(tasks={"side": "held_out"}),
        f"{ENV}.tasks.side",
    ),
    (
        with_env(tasks={"holdout_fraction": 0.9}),
        with_env(tasks={"holdout_fraction": 1.0}),
        f"{ENV}.tasks.holdout_fraction",
    ),
    (
        with_env(headers_from="h", agents={"x": {"model": "m", "base_url": "http://h/v1"}}),
        with_env(headers_from="h", agents={"x": {}}),
        f"{ENV}.headers_from",
    ),
    (
        with_env(warm_containers=2),
        measured_elsewhere(warm_containers=2),
        "orchestrator.eval.env.0.warm_containers",
    ),
    (
        with_env(python="/x/bin/python"),
        measured_elsewhere(python="/x/bin/python"),
        "orchestrator.eval.env.0.python",
    ),
    (
        with_env(python="/x/bin/python"),
        with_env(address="ipc:///x/run"),
        f"{ENV}.address",
    ),
    (
        measured_elsewhere(),
        measured_elsewhere(prepare=["make"]),
        "orchestrator.eval.env.0.prepare",
    ),
    (
        with_env(tasks={"limit": 3}),
        measured_elsewhere(tasks={"limit": 3}),
        "orchestrator.eval.env.0.tasks",
    ),
    (
        {"model": {"renderer": {"name": "qwen3", "thinking_retention": "all"}}},
        {"model": {"renderer": {"name": "default", "thinking_retention": "all"}}},
        "model.renderer.thinking_retention",
    ),
    (
        orchestrator(max_in_flight_episodes=8),
        orchestrator(max_in_flight_episodes=7),
        "orchestrator.max_in_flight_episodes",
    ),
    (
        {"trainer": {"num_processes": 128}},
        {"trainer": {"num_processes": 129}},
        "orchestrator.groups_per_batch",
    ),
    (
        {"trainer": {"updates_per_batch": 16}},
        {"trainer": {"updates_per_batch": 17}},
        "trainer.updates_per_batch",
    ),
    (optimizer(warmup_steps=19), optimizer(warmup_steps=20), "trainer.optimizer.warmup_steps"),
    (
        optimizer(schedule="linear", min_lr_ratio=0.1),
        optimizer(min_lr_ratio=0.1),
        "trainer.optimizer.min_lr_ratio",
    ),
    (
        loss(importance_sampling="masked", importance_cap=3.0),
        loss(importance_cap=3.0),
        "trainer.loss.importance_cap",
    ),
    (
        loss(importance_sampling="truncated", importance_level="sequence"),
        loss(importance_level="sequence", importance_cap=2.0),
        "trainer.loss.importance_level",
    ),
    (
        with_env(algo={"length_penalty": True, "length_weights": {"output": 1.0}}),
        with_env(algo={"length_weights": {"output": 1.0}}),
        f"{ENV}.algo.length_weights",
    ),
    (optimizer(betas=[0.0, 0.999]), optimizer(betas=[0.5, 1.0]), "trainer.optimizer.betas.1"),
    (
        optimizer(type="sgd", lr=0.1, warmup_steps=19),
        optimizer(type="sgd", lr=0.1, warmup_steps=20),
        "trainer.optimizer.warmup_steps",
    ),
    (optimizer(type="sgd", lr=0.1), optimizer(type="sgd"), "trainer.optimizer.lr"),
    ({"patience_steps": 10}, {"patience_steps": 11}, "patience_steps"),
    (
        orchestrator(eval=EVAL) | {"patience_steps": 10},
        orchestrator(eval=EVAL | {"interval_steps": 6}) | {"patience_steps": 11},
        "patience_steps",
    ),
    (
        optimizer(type="muon", betas=[0.0, 0.999]),
        optimizer(type="muon", betas=[0.5, 1.0]),
        "trainer.optimizer.betas.1",
    ),
    (
        {"trainer": {"micro_batch_tokens": 2048}},
        {"trainer": {"micro_batch_tokens": 2047}},
        "trainer.micro_batch_tokens",
    ),
    (
        with_sampling(temperature=0.01),
        with_sampling(temperature=0),
        f"{ENV}.sampling.temperature",
    ),
    (
        with_sampling(temperature=0.01),
        with_sampling(temperature=0.009),
        f"{ENV}.sampling.temperature",
    ),
    (
        orchestrator(eval={"env": [{"id": "reverse-text"}], "sampling": {"temperature": 0}}),
        {
            "orchestrator": {
                "train": {"env": [{"id": "reverse-text"}], "sampling": {"temperature": 0}}
            }
        },
        "orchestrator.train.sampling.temperature",
    ),
    (
        with_env(
            sampling={"temperature": 0.7},
            agents={
                "first": {"sampling": {"temperature": 0.7}},
                "judge": {"sampling": {"temperature": 0}},
                "second": {"train": False, "sampling": {"temperature": 0.1}},
                "third": {
                    "model": "m",
                    "base_url": "http://x/v1",
                    "sampling": {"temperature": 0.1},
                },
            },
        ),
        with_env(sampling={"temperature": 0.7}, agents={"first": {"sampling": {"temperature": 1}}}),
        f"{ENV}.agents.first.sampling.temperature",
    ),
    (with_env(group_size=2), with_env(group_size=1), f"{ENV}.group_size"),
    (
        with_env(group_size=1, algo={"type": "my.module:Alone"}),
        with_env(group_size=1, algo={"type": "grpo"}),
        f"{ENV}.group_size",
    ),
    (with_env(id="a", name="A"), with_env(id="a b"), f"{ENV}.name"),
    (
        measured_elsewhere(),
        measured_elsewhere(address="http://x"),
        "orchestrator.eval.env.0.address",
    ),
    (measured_elsewhere(), measured_elsewhere(agents={}), "orchestrator.eval.env.0.address"),
    (
        with_sampling(extra_body={"top_k": -1, "min_p": 0.0, "stop": ["END"]}, top_p=1.0),
        with_sampling(extra_body={"top_k": 5}),
        f"{ENV}.sampling.extra_body.top_k",
    ),
    (
        with_env(
            sampling={"top_p": 0.9},
            algo={"type": "sft"},
            agents={"teacher": {"model": "m", "base_url": "http://x/v1"}},
        ),
        with_sampling(top_p=0.9),
        f"{ENV}.sampling.top_p",
    ),
    (
        with_sampling(extra_body={"logit_bias": {}}),
        with_sampling(extra_body={"logit_bias": {"7": -100}}),
        f"{ENV}.sampling.extra_body.logit_bias",
    ),
    (
        {"orchestrator": {"eval": {"sampling": {"top_p": 0.5}, "env": [{"id": "x"}]}}},
        {"orchestrator": {"train": {"sampling": {"extra_body": {"min_p": 0.1}}}}},
        "orchestrator.train.sampling.extra_body.min_p",
    ),
    (
        with_env(agents={"judge": {"sampling": {"top_p": 0.5}}}),
        with_env(agents={"player": {"sampling": {"top_p": 0.5}}}),
        f"{ENV}.agents.player.sampling.top_p",
    ),
    (
        with_sampling(extra_body={"stop": ["x"]}),
        with_sampling(extra_body={"logprobs": 5}),
        f"{ENV}.sampling.extra_body.logprobs",
    ),
    (
        {"seed": 5},
        with_sampling(extra_body={"seed": 5}),
        f"{ENV}.sampling.extra_body.seed",
    ),
    (
        orchestrator(eval={**RARE, "at_end": True}),
        orchestrator(eval={**RARE, "at_end": False}),
        "orchestrator.eval.interval_steps",
    ),
    (
        {"inference": {"extra_args": {"max_num_batched_tokens": 9}}},
        {"inference": {"extra_args": {"served-model-name": "x"}}},
        "inference.extra_args.served-model-name",
    ),
    (
        {"inference": {"host": "0.0.0.0", "allow_public_bind": True}},
        {"inference": {"host": "0.0.0.0"}},
        "inference.host",
    ),
    ({"inference": {"host": "::1"}}, {"inference": {"host": "::"}}, "inference.host"),
    (
        prometheus(host="0.0.0.0", allow_public_bind=True),
        prometheus(host="0.0.0.0"),
        "monitor.0.host",
    ),
    ({"inference": {"host": "localhost"}}, {"inference": {"host": "node7"}}, "inference.host"),
    (
        with_env(agent={"max_input_tokens": 9, "max_total_tokens": 10}),
        with_env(agent={"max_input_tokens": 10, "max_total_tokens": 10}),
        f"{ENV}.agent.max_input_tokens",
    ),
    (
        with_env(agents={"judge": {"model": "m", "base_url": "http://x", "api_key_var": "K"}}),
        with_env(agents={"judge": {"base_url": "http://x", "api_key_var": "K"}}),
        f"{ENV}.agents.judge.model",
    ),
    (
        with_env(agents={"judge": {"harness": {"id": "null", "x": 1}}}),
        with_env(agents={"judge": {"harness": {"id": 3, "x": 1}}}),
        f"{ENV}.agents.judge.harness.id",
    ),
    (
        with_env(agents={"judge": {"sampling": {"top_p": 0.5}}}),
        with_env(agents={"judge": {"sampling": {"extra_body": {"n": 2}}}}),
        f"{ENV}.agents.judge.sampling.extra_body.n",
    ),
    (with_env(env_vars={"MINE": "1"}), with_env(env_vars={"MI=NE": "1"}), f"{ENV}.env_vars.MI=NE"),
    (with_env(env_vars={"MINE": "1"}), with_env(env_vars={"MINE": "\0"}), f"{ENV}.env_vars.MINE"),
]


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        ({}, "they are made every 30.0 minutes; use a multiple of checkpoint.interval_steps"),
        ({"interval_minutes": None}, "none is made"),
        ({"interval_steps": 5, "interval_minutes": None}, "they are made every 5 steps"),
    ],
)
def test_kept_checkpoints_are_told_when_any_is_made(checkpoint: dict[str, Any], told: str) -> None:
    config = build_run_config({"checkpoint": {"keep_interval_steps": 12, **checkpoint}})
    assert told in str(contradictions_of(config)[0])


@pytest.mark.parametrize(("good", "refused", "key"), BORDERS, ids=[key for _, _, key in BORDERS])
def test_border_of_a_conflict(good: dict[str, Any], refused: dict[str, Any], key: str) -> None:
    assert keys(good) == []
    assert keys(refused) == [key]


def test_all_conflicts_are_found_at_once() -> None:
    changes = with_env(group_size=1, settings={"taskset": {}}, env_vars={"GRADUS_X": ""})
    too_long = {"trainer": {"micro_batch_tokens": 8}}
    assert len(keys({**changes, **too_long, "inference": {"host": "0.0.0.0"}})) == 5


def test_a_problem_with_a_variable_never_shows_its_value() -> None:
    (problem,) = env_vars_problems("trainer", ("env_vars",), {"RANK": "canary"})
    assert "canary" not in str(problem)


def test_a_reserved_variable_is_refused_only_where_it_is_set() -> None:
    assert list(env_vars_problems("environment", (), {"RANK": "0"})) == []
    assert len(list(env_vars_problems("trainer", (), {"RANK": "0"}))) == 1


@pytest.mark.parametrize("role", list(RESERVED))
def test_every_reserved_variable_has_a_reason(role: str) -> None:
    for name in RESERVED[role]:
        (problem,) = env_vars_problems(role, (), {name: "x"})
        assert len(problem.message.partition("gradus sets it itself: ")[2]) > len("Remove it here")


def test_supervised_run_has_fewer_ways_to_contradict_itself() -> None:
    assert contradictions_of(build_sft_config()) == []
    assert (
        len(contradictions_of(build_sft_config({"num_processes": 999, "micro_batch_tokens": 8})))
        == 2
    )


def test_sampling_is_inherited_value_by_value() -> None:
    inner = SamplingConfig(top_p=0.5, extra_body={"a": 1})
    outer = SamplingConfig(temperature=0.7, top_p=0.9, extra_body={"a": 2, "b": 3})
    assert merged_sampling(inner, outer) == SamplingConfig(
        temperature=0.7, top_p=0.5, extra_body={"a": 1, "b": 3}
    )
    assert merged_sampling(SamplingConfig(), outer) == outer


def test_defaults_of_sampling_survive_a_section_that_sets_one_value() -> None:
    changes = with_env()
    changes["orchestrator"]["train"]["sampling"] = {"temperature": 0.3}
    config = build_run_config(changes)
    (source,) = resolve_sources(config).train
    sampling = source.complete.sampling
    assert sampling.temperature == 0.3
    assert sampling.max_completion_tokens == DEFAULT_SAMPLING.max_completion_tokens


def test_an_algorithm_is_inherited_whole() -> None:
    config = build_run_config(with_env(algo={"type": "my.module:Mine"}))
    (source,) = resolve_sources(config).train
    assert source.complete.algo == build_algorithm_config("my.module:Mine")


def test_in_flight_limits_must_be_in_order() -> None:
    config = build_run_config({"orchestrator": {"min_in_flight_episodes": 300}})
    (problem,) = contradictions_of(config)
    assert "more than max_in_flight_episodes = 256" in problem.message


def test_a_reply_may_be_as_long_as_the_context() -> None:
    sampling = {"train": {"sampling": {"max_completion_tokens": 256}}}
    config = build_run_config({"model": {"max_length_tokens": 256}, "orchestrator": sampling})
    assert contradictions_of(config) == []


@pytest.mark.parametrize(
    ("alarm", "key", "said"),
    [
        ({"above": 1.0, "metric": "y"}, "metric", "alarm already"),
        ({"above": 1.0, "action": "checkpoint"}, "action", "saves no checkpoints"),
    ],
)
def test_an_alarm_that_cannot_ring_or_act_is_refused(
    alarm: dict[str, Any], key: str, said: str
) -> None:
    alarms = [{"metric": "x", **alarm}, {"metric": "y", "above": 1.0}]
    config = build_run_config(
        {"orchestrator": {"alarm": alarms[::-1]}, "checkpoint": {"interval_minutes": None}}
    )
    found = contradictions_of(config)
    places = [it for it in found if it.path == ("orchestrator", "alarm", 1, key)]
    assert len(places) == 1, found
    assert said in places[0].message

"""Configs of prime-rl become configs of gradus, and what has no equivalent is listed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.main import main
from gradus.config import EvalConfig, RunConfig, SftConfig
from gradus.config.keys import UNKNOWN, annotation_at
from gradus.installed import PLAYED, has_plugin
from gradus_convert.draft import To, parts_of
from gradus_convert.foreign import MOVES
from gradus_convert.prime_rl import from_prime_rl

ENV = {"id": "gradus-reverse-text", "group_size": 8}


def source(**entry: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": {"env": [{"group_size": 8, **entry}]}}}


def train(**entry: Any) -> dict[str, Any]:
    return {"orchestrator": {"train": entry}}


_ENGINE_SWITCHES = ("enable_prefix_caching", "enable_expert_parallel")
RENAMED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("seq_len", {"seq_len": 64}, {"model": {"max_length_tokens": 64}}),
    (
        "max_model_len",
        {"inference": {"model": {"max_model_len": 64}}},
        {"model": {"max_length_tokens": 64}},
    ),
    (
        "batch_size and group_size",
        {"orchestrator": {"batch_size": 64, "group_size": 8, "train": {"env": [{"id": "a"}]}}},
        {"orchestrator": {"groups_per_batch": 8, "train": {"env": [{"id": "a", "group_size": 8}]}}},
    ),
    (
        "rollouts_per_example",
        {"orchestrator": {"batch_size": 64, "rollouts_per_example": 4, "env": [{"id": "a"}]}},
        {
            "orchestrator": {
                "groups_per_batch": 16,
                "train": {"env": [{"id": "a", "group_size": 4}]},
            }
        },
    ),
    (
        "ckpt",
        {"ckpt": {"interval": 5, "keep_last": 1}},
        {"checkpoint": {"interval_steps": 5, "keep_last": 2}},
    ),
    (
        "optim",
        {"trainer": {"optim": {"lr": 1e-5, "max_norm": 0.5}}},
        {"trainer": {"optimizer": {"lr": 1e-5, "max_grad_norm": 0.5}}},
    ),
    (
        "one beta of adamw",
        {"trainer": {"optim": {"betas1": 0.8}}},
        {"trainer": {"optimizer": {"betas": [0.8, 0.999]}}},
    ),
    (
        "one beta of muon",
        {"trainer": {"optim": {"type": "muon", "betas1": 0.8}}},
        {"trainer": {"optimizer": {"type": "muon", "betas": [0.8, 0.95]}}},
    ),
    ("args", source(id="a", args={"x": 1}), source(id="a", taskset={"x": 1})),
    (
        "args.config.harness.id",
        source(id="a", args={"config": {"harness": {"id": "bash"}}}),
        source(id="a", agent={"harness": {"id": "bash"}}),
    ),
    ("taskset.id", source(taskset={"id": "a", "x": 1}), source(id="a", taskset={"x": 1})),
    (
        "harness.runtime",
        source(id="a", harness={"id": "null", "runtime": {"type": "docker"}}),
        source(id="a", agent={"harness": {"id": "null"}, "runtime": {"type": "docker"}}),
    ),
    (
        "timeout",
        source(id="a", timeout={"setup": 1.0, "rollout": 2.0, "scoring": 3.0}),
        source(id="a", agent={"timeout": {"setup": 1.0, "rollout": 2.0, "scoring": 3.0}}),
    ),
    (
        "eval",
        {"orchestrator": {"eval": {"interval": 5, "num_examples": 9, "env": [{"id": "a"}]}}},
        {"orchestrator": {"eval": {"interval_steps": 5, "env": [{"id": "a", "num_tasks": 9}]}}},
    ),
    (
        "max_off_policy_steps",
        {"orchestrator": {"max_off_policy_steps": 3}},
        {"orchestrator": {"max_staleness": 3}},
    ),
    (
        "max_inflight_rollouts",
        {"orchestrator": {"max_inflight_rollouts": 3}},
        {"orchestrator": {"max_in_flight_episodes": 3}},
    ),
    (
        "trainer.model",
        {
            "trainer": {
                "model": {
                    "ac": {"freq": 1},
                    "compile": {},
                    "cp": 2,
                    "ep": 2,
                    "cp_style": "ring",
                    "optim_cpu_offload": True,
                    "lora": {"rank": 8},
                }
            },
            "deployment": {"num_train_gpus": 2},
        },
        {
            "trainer": {
                "num_processes": 2,
                "lora": {"rank": 8},
                "parallel": {
                    "activation_checkpointing": "full",
                    "compile": True,
                    "context_parallel_size": 2,
                    "expert_parallel_size": 2,
                    "context_parallel_style": "ring",
                    "offload_optimizer": True,
                },
            }
        },
    ),
    (
        "a micro batch holds the longest sample",
        {"seq_len": 16384},
        {"model": {"max_length_tokens": 16384}, "trainer": {"micro_batch_tokens": 16384}},
    ),
    (
        "runtime without a type",
        source(id="a", env={"agent": {"runtime": {"labels": ["x"]}}}),
        source(id="a", agent={"runtime": {"labels": ["x"], "type": "prime"}}),
    ),
    (
        "weight_broadcast",
        {"weight_broadcast": {"type": "nccl"}},
        {"trainer": {"weight_transfer": "broadcast"}},
    ),
    (
        "algo",
        {"orchestrator": {"algo": {"type": "grpo", "scale_by_std": True}}},
        train(algo={"type": "grpo", "scale_by_std": True}),
    ),
    ("advantage", {"orchestrator": {"advantage": "ema_per_member"}}, train(algo={"type": "rae"})),
    (
        "length penalty",
        {"orchestrator": {"algo": {"length_penalty": {"num_turns_weight": 0.2}}}},
        train(
            algo={
                "type": "grpo",
                "length_penalty": True,
                "length_weights": {"output": 0.25, "input": 0.1, "turns": 0.2},
            }
        ),
    ),
    (
        "env.sft",
        source(id="a", sft={"roles": {"tool": 0.2}}),
        source(
            id="a",
            algo={"type": "echo", "normalize": "batch", "roles": {"tool": 0.2}},
        ),
    ),
    (
        "training_mode and teacher",
        {
            "orchestrator": {
                "training_mode": "opd",
                "teacher": {"model": {"name": "t"}, "client": {"base_url": ["http://x:1/v1"]}},
            }
        },
        train(algo={"type": "opd", "reference": {"base_url": "http://x:1", "model": "t"}}),
    ),
    (
        "inference.parallel.tp",
        {"inference": {"parallel": {"tp": 2}}},
        {"inference": {"tensor_parallel_size": 2}},
    ),
    (
        "vllm_extra",
        {"inference": {"vllm_extra": {"kv_cache_dtype": "fp8"}}},
        {"inference": {"extra_args": {"kv_cache_dtype": "fp8"}}},
    ),
    (
        "source",
        {"orchestrator": {"train": {"source": [{"env": {"taskset": {"id": "a"}, "n": 2}}]}}},
        {"orchestrator": {"train": {"env": [{"id": "a", "group_size": 1, "settings": {"n": 2}}]}}},
    ),
    (
        "roles",
        source(env={"taskset": {"id": "a"}, "judge": {"model": "m", "max_turns": 2}}),
        source(id="a", agents={"judge": {"model": "m", "max_turns": 2}}),
    ),
    (
        "seats of two",
        source(id="gradus-games", agents={"player0": {"train": True}, "player1": {"train": False}}),
        source(id="gradus-games", agents={"first": {"train": True}, "second": {"train": False}}),
    ),
    (
        "seats of both names",
        source(id="kuhn-poker", agents={"player0": {"train": True}, "first": {"train": False}}),
        source(id="kuhn-poker", agents={"player0": {"train": True}, "first": {"train": False}}),
    ),
    (
        "several sets of data",
        {
            "max_steps": 3,
            "data": {"source": [{"dataset": "a", "weight": 2.0}, {"dataset": "b", "split": "s"}]},
        },
        {
            "max_steps": 3,
            "data": {"path": "a", "weight": 2.0, "mix": [{"path": "b", "split": "s"}]},
        },
    ),
    (
        "router replay",
        {"trainer": {"enable_router_replay": True}},
        {"trainer": {"router_replay": "engine"}},
    ),
    (
        "no router replay",
        {"trainer": {"enable_router_replay": False}},
        {"trainer": {"router_replay": "off"}},
    ),
    (
        "placement",
        {
            "deployment": {"type": "single_node", "num_infer_gpus": 6, "num_train_gpus": 2},
            "inference": {"parallel": {"tp": 2}},
        },
        {
            "inference": {"tensor_parallel_size": 2, "replicas": 3},
            "trainer": {"num_processes": 2},
        },
    ),
    (
        "placement on nodes",
        {"deployment": {"type": "multi_node", "num_infer_nodes": 2, "gpus_per_node": 4}},
        {
            "inference": {"replicas": 8},
            "trainer": {"num_processes": 4},
            "launch": {"nodes": {"number": 3, "gpus": 4}},
        },
    ),
    (
        "arguments of vLLM",
        {"inference": {"enable_prefix_caching": True, "enable_expert_parallel": True}},
        {"inference": {"extra_args": dict.fromkeys(_ENGINE_SWITCHES, True)}},
    ),
    (
        "a trained vision encoder",
        {"model": {"vlm": {"freeze_vision_encoder": False}}},
        {"trainer": {"train_vision": True}},
    ),
    (
        "equal rewards are kept",
        {"orchestrator": {"buffer": {"online_difficulty_filtering": False}}},
        {"orchestrator": {"filters": [{"type": "zero_advantage", "enforce": False}]}},
    ),
    (
        "what gradus does anyway",
        {
            "orchestrator": {
                "max_lag": 1,
                "buffer": {"online_difficulty_filtering": True},
                "curriculum": {"gates": {"zero_advantage": True}},
                "multi_agent": {"drop_judge": True, "filter_by_learner_seat": True},
            }
        },
        {"orchestrator": {"max_lag": 1}},
    ),
    (
        "env.sft.normalization",
        source(id="a", sft={"normalization": "tokens"}),
        source(id="a", algo={"type": "echo", "normalize": "tokens"}),
    ),
    (
        "dotted harness",
        source(id="a", harness={"id": "verifiers.v1.packages.harnesses.rlm"}),
        source(id="a", agent={"harness": {"id": "rlm"}}),
    ),
    (
        "teacher_rollout_model",
        {
            "orchestrator": {
                "teacher_rollout_model": {
                    "model": {"name": "t"},
                    "client": {"base_url": "http://t/v1"},
                },
                "train": {"env": [{"id": "a", "group_size": 8}]},
            }
        },
        train(
            algo={"type": "sft"},
            env=[
                {
                    "id": "a",
                    "group_size": 8,
                    "agents": {"agent": {"model": "t", "base_url": "http://t/v1"}},
                }
            ],
        ),
    ),
    (
        "renderer",
        {"orchestrator": {"renderer": {"name": "qwen3"}}},
        {"model": {"renderer": {"name": "qwen3"}}},
    ),
]


@pytest.mark.parametrize(("old", "new"), [row[1:] for row in RENAMED], ids=[r[0] for r in RENAMED])
def test_a_key_of_prime_rl_becomes_ours(old: dict[str, Any], new: dict[str, Any]) -> None:
    converted = from_prime_rl(old)
    assert converted.values == new
    assert converted.left_out == ()


@pytest.mark.parametrize(
    ("old", "note"),
    [
        ({"wandb": {"id": "x"}}, 'wandb.id = "x": gradus has no such setting'),
        ({"weight_broadcast": {"port": 1}}, "weight_broadcast.port = 1"),
        ({"ckpt": {}}, "ckpt: write checkpoint.interval_steps"),
        ({"clean_output_dir": True}, "clean_output_dir = true: write `gradus rl --clean`"),
        (
            {"seq_len": 64, "inference": {"model": {"max_model_len": 32}}},
            "inference.model.max_model_len: two values; model.max_length_tokens = 64 was taken",
        ),
        (
            {"orchestrator": {"batch_size": 10, "group_size": 4}},
            "orchestrator.batch_size: 10 is not a multiple of 4; rounded down",
        ),
        (
            {"val": {"data": {"source": [{"dataset": "a"}, {"dataset": "b"}]}}},
            'val.data.source.1.dataset = "b": one data set is validated on',
        ),
        ({"inference": {"vllm": {"seed": 3}}}, "inference.vllm.seed = 3: write seed"),
        (source(id="a", sft={"on_tool_outputs": False}), "orchestrator.train.env.0.sft"),
        (
            source(id="a", args={"holdout_fraction": 0.1}),
            "orchestrator.train.env.0.taskset: gradus holds",
        ),
    ],
)
def test_what_has_no_equivalent_is_listed(old: dict[str, Any], note: str) -> None:
    (left,) = from_prime_rl({"max_steps": 3, **old}).left_out
    assert left.startswith(note)


OLD = """
max_steps = 20
seq_len = 512
[model]
name = "someone/tiny"
[wandb]
project = "p \\"x\\""
[trainer.optim]
lr = 1e-5
[orchestrator]
batch_size = 64
group_size = 8
[orchestrator.sampling]
max_tokens = 64
stop = ["END"]
[[orchestrator.train.env]]
taskset = { id = "gradus-reverse-text", max_words = 3 }
harness = { id = "null", runtime = { type = "subprocess" } }
[orchestrator.eval]
interval = 5
[[orchestrator.eval.env]]
id = "gradus-reverse-text"
args = { max_words = 2 }
num_examples = 4
num_workers = 2
[ckpt]
interval = 10
"""


def test_the_printed_file_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.toml").write_text(OLD)
    assert main(["convert", "old.toml"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["orchestrator"]["groups_per_batch"] == 8
    assert tomllib.loads(printed)["monitor"] == [{"type": "wandb", "project": 'p "x"'}]
    Path("new.toml").write_text(printed)
    assert main(["check", "--level", "config", "@", "new.toml"]) == 0
    shown = capsys.readouterr().out
    assert "run: 20 steps of 8 groups" in shown
    assert "4 tasks of gradus-reverse-text" in shown or "eval_gradus-reverse-text" in shown


@pytest.mark.parametrize("key", ["holdout_side", "held_out_side", "side"])
def test_the_held_out_side_of_a_task_set_is_that_of_the_source(key: str) -> None:
    values = source(id="a", taskset={"holdout_fraction": 0.1, key: "test"})
    (found,) = from_prime_rl(values).values["orchestrator"]["train"]["env"]
    assert found["tasks"] == {"holdout_fraction": 0.1, "side": "held_out"}


@pytest.mark.parametrize("name", ["aime24", "aime2024", "aime2025", "math-env"])
def test_a_task_set_of_another_name_is_one_that_is_here(name: str) -> None:
    for written in (name, f"primeintellect/{name}@1", name.replace("-", "_")):
        (found,) = from_prime_rl(source(id=written)).values["orchestrator"]["train"]["env"]
        assert has_plugin(found["id"], PLAYED)
        assert found["taskset"]["source"] == "hub"


def test_what_is_no_file_of_prime_rl_is_refused() -> None:
    assert main(["convert", "trl", "grpo.sh"]) == 64


def test_every_key_that_moves_leads_to_a_key_that_exists() -> None:
    models = {"rl": RunConfig, "sft": SftConfig, "eval": EvalConfig}
    for command, rows in MOVES.items():
        for new in rows.values():
            key = new.key if isinstance(new, To) else new
            assert not key or annotation_at(models[command], parts_of(key)) is not UNKNOWN, key


def test_a_group_of_nothing_is_refused_and_no_mistake_of_ours() -> None:
    orchestrator = {"batch_size": 64, "rollouts_per_example": 0, "train": {"env": [{"id": "a"}]}}
    assert "env.0.group_size: 0: " in from_prime_rl({"orchestrator": orchestrator}).toml()

"""Sizes that do not fit together are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config, build_sft_config, contradictions_of

from gradus.config import (
    EnvironmentProcessConfig,
    ModelConfig,
    ParallelConfig,
    TrainerConfig,
    resolve,
)
from gradus.config.families import image_problems, mixture_problems
from gradus.config.schema.trainer import data_parallel_size
from gradus.config.sources import resolve_sources
from gradus.plan.hardware import head_problem
from gradus.plan.machine import check, has_module, parallel_machine_problems


def problems_of(num_processes: int, **parallel: Any) -> list[str]:
    trainer = {"num_processes": num_processes, "parallel": parallel}
    return [str(problem) for problem in contradictions_of(build_run_config({"trainer": trainer}))]


@pytest.mark.parametrize("name", ["replicate_size", "context_parallel_size"])
def test_a_size_must_divide_the_processes(name: str) -> None:
    assert problems_of(4, **{name: 2}) == []
    (problem,) = problems_of(4, **{name: 3})
    assert problem.startswith(f"trainer.parallel.{name}: 3 does not divide the 4 processes")


def test_owners_of_experts_must_divide_the_processes_of_a_copy() -> None:
    assert problems_of(4, expert_parallel_size=2, replicate_size=2) == []
    (problem,) = problems_of(4, expert_parallel_size=4, replicate_size=2)
    assert "expert_parallel_size: 4 does not divide the 2 processes of one copy" in problem


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_experts": 8}, []),
        ({"text_config": {"n_routed_experts": 6}}, ["4 does not divide the 6 experts of model"]),
        ({"model_type": "qwen3"}, ["4: model 'm' (qwen3) has no experts to share"]),
        ({}, []),
    ],
)
def test_experts_are_shared_evenly_or_refused(config: dict[str, Any], words: list[str]) -> None:
    settings = TrainerConfig(parallel=ParallelConfig(expert_parallel_size=4))
    found = [str(it) for it in mixture_problems(("trainer",), settings, "m", config)]
    assert len(found) == len(words)
    for problem, word in zip(found, words, strict=True):
        assert problem.startswith("trainer.parallel.expert_parallel_size: ")
        assert word in problem


def test_a_supervised_run_is_checked_alike() -> None:
    config = build_sft_config({"num_processes": 2, "parallel": {"context_parallel_size": 4}})
    assert "4 does not divide" in str(contradictions_of(config)[0])


def test_batches_are_packed_for_data_parallel_ranks() -> None:
    trainer = {"num_processes": 8, "parallel": {"context_parallel_size": 4, "replicate_size": 2}}
    configs = resolve(build_run_config({"trainer": trainer}), run_dir=Path("x"), term=0)
    assert configs.launched.data_parallel_size == 2
    assert data_parallel_size(8, ParallelConfig()) == 8


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "words"),
    [
        (16, 8, 4, None),
        (16, 8, 16, None),
        (16, 4, 8, None),
        (16, 1, 16, None),
        (12, 8, 8, "12 attention heads cannot be shared by 8"),
        (12, 4, 6, "4 key heads can neither be shared by 6"),
    ],
)
def test_heads_are_shared_or_copied_evenly_or_refused(
    heads: int, key_heads: int, size: int, words: str | None
) -> None:
    problem = head_problem(heads, key_heads, size)
    assert (problem is None) if words is None else (words in (problem or ""))


def model_directory(folder: Path, content: str) -> ModelConfig:
    (folder / "config.json").write_text(content)
    return ModelConfig(name=str(folder))


def machine(model: ModelConfig, variables: dict[str, str], **parallel: Any) -> list[str]:
    found = parallel_machine_problems(("parallel",), ParallelConfig(**parallel), model, variables)
    return [str(problem) for problem in found]


def test_heads_of_a_local_model_are_checked_before_anything_starts(tmp_path: Path) -> None:
    model = model_directory(tmp_path, '{"num_attention_heads": 6, "num_key_value_heads": 2}')
    assert machine(model, {}, context_parallel_size=2) == []
    (problem,) = machine(model, {}, context_parallel_size=4)
    assert problem.startswith("parallel.context_parallel_size: the model's 6 attention heads")
    assert problem.endswith("or context_parallel_style = 'ring'")
    in_ring = {"context_parallel_size": 4, "context_parallel_style": "ring"}
    assert machine(model, {}, **in_ring) == []
    model = model_directory(tmp_path, '{"model_type": "llama4_text", "num_attention_heads": 4}')
    assert machine(model, {}, context_parallel_size=4) == []
    (problem,) = machine(model, {}, **in_ring)
    assert "the model attends in chunks, which a ring does not pass on; write 'heads'" in problem


DELTA = {"linear_num_value_heads": 6, "linear_num_key_heads": 2}
MAMBA = {"mamba_n_heads": 12, "mamba_n_groups": 4}
STATES: list[tuple[str, dict[str, object], int, str | None]] = [
    ("qwen3_next", DELTA, 2, None),
    ("qwen3_next", DELTA, 6, None),
    ("qwen3_next", DELTA, 4, "6 linear_num_value_heads cannot be shared by 4"),
    ("olmo_hybrid", DELTA, 3, "2 linear_num_key_heads can neither be shared by 3"),
    ("kimi_linear", {"linear_num_heads": 6}, 4, "6 linear_num_heads"),
    ("kimi_linear", {"linear_attn_config": {"num_heads": 6}}, 4, "6 linear_num_heads"),
    ("kimi_linear", {"linear_attn_config": {"num_heads": 6}}, 3, None),
    ("kimi_linear", {"linear_attn_config": ["odd"]}, 4, None),
    ("mamba2", {"num_heads": 24, "n_groups": 1}, 24, None),
    ("mamba2", {"num_heads": 24, "n_groups": 1}, 16, "24 num_heads"),
    ("nemotron_h", {"mamba_num_heads": 24, "n_groups": 8}, 12, "8 n_groups can neither"),
    ("falcon_h1", MAMBA, 12, None),
    ("granitemoehybrid", MAMBA, 8, "12 mamba_n_heads"),
    ("granitemoehybrid", {**MAMBA, "layer_types": ["attention", "full_attention"]}, 8, None),
    ("bamba", {**MAMBA, "layer_types": ["attention", "mamba"]}, 8, "12 mamba_n_heads"),
    ("lfm2", {"hidden_size": 96}, 32, None),
    ("lfm2_moe", {"hidden_size": 96}, 64, "96 hidden_size"),
    ("llama", DELTA, 4, None),
    ("mamba2", {"num_heads": "24"}, 16, None),
]


@pytest.mark.parametrize("style", ["heads", "ring"])
@pytest.mark.parametrize(("family", "sizes", "size", "words"), STATES)
def test_layers_with_state_are_shared_by_heads_in_a_ring_too(
    tmp_path: Path, family: str, sizes: dict[str, object], size: int, words: str | None, style: str
) -> None:
    model = model_directory(tmp_path, json.dumps({"model_type": family, **sizes}))
    found = machine(model, {}, context_parallel_size=size, context_parallel_style=style)
    if words is None:
        assert found == []
    else:
        assert [words in it and it.endswith("choose another size") for it in found] == [True]


def test_heads_of_layers_that_have_others_are_checked_too(tmp_path: Path) -> None:
    content = {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "attention_k_eq_v": True},
        **{"num_global_key_value_heads": 3, "global_head_dim": 64},
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (problem,) = machine(
        model_directory(tmp_path, json.dumps(content)), {}, context_parallel_size=4
    )
    assert "the model's 3 key heads" in problem


@pytest.mark.parametrize("content", ["no json", "[]", "{}", '{"text_config": {}}'])
def test_a_config_that_says_nothing_about_heads_is_left_to_the_trainer(
    tmp_path: Path, content: str
) -> None:
    assert machine(model_directory(tmp_path, content), {}, context_parallel_size=2) == []


def test_compiling_without_a_compiler_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(name="someone/else")
    (problem,) = machine(model, {"PATH": str(tmp_path)}, compile=True)
    assert "needs a C compiler" in problem
    own = tmp_path / "my-compiler"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o700)
    assert machine(model, {"PATH": str(tmp_path), "CXX": "my-compiler"}, compile=True) == []


def test_compiling_by_default_asks_nothing_of_the_machine(tmp_path: Path) -> None:
    assert machine(ModelConfig(name="someone/else"), {"PATH": str(tmp_path)}) == []


@pytest.mark.parametrize("kept", ["none", "selective"])
def test_activations_leave_a_gpu_only_as_inputs_of_layers(kept: str) -> None:
    (problem,) = problems_of(1, offload_activations=True, activation_checkpointing=kept)
    assert problem.startswith(
        f"trainer.parallel.offload_activations: activation_checkpointing = '{kept}' keeps more"
    )
    assert problems_of(1, offload_activations=True, activation_checkpointing="full") == []


def test_muon_is_not_updated_on_cpu_cores() -> None:
    trainer = {"optimizer": {"type": "muon"}, "parallel": {"offload_optimizer": True}}
    (problem,) = contradictions_of(build_run_config({"trainer": trainer}))
    assert str(problem).startswith("trainer.parallel.offload_optimizer: Muon multiplies")
    (problem,) = contradictions_of(build_sft_config(trainer))
    assert str(problem).startswith("parallel.offload_optimizer: Muon multiplies")
    for kind in ("adamw", "sgd"):
        chosen = trainer | {"optimizer": {"type": kind, "lr": 0.1}}
        assert contradictions_of(build_run_config({"trainer": chosen})) == []


def test_float8_goes_neither_with_adapters_nor_with_float32() -> None:
    trainer: dict[str, Any] = {"parallel": {"float8": True}}
    assert contradictions_of(build_run_config({"trainer": trainer})) == []
    (problem,) = contradictions_of(build_run_config({"trainer": trainer | {"lora": {}}}))
    assert str(problem).startswith("trainer.parallel.float8: adapters stand inside the layers")
    (problem,) = contradictions_of(build_sft_config(trainer | {"compute_dtype": "float32"}))
    assert str(problem).startswith("parallel.float8: goes with compute_dtype = 'bfloat16'")


REFERENCE = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}


def test_a_tower_is_trained_without_adapters() -> None:
    trained: dict[str, Any] = {"train_vision": True}
    assert contradictions_of(build_run_config({"trainer": trained})) == []
    (problem,) = contradictions_of(build_run_config({"trainer": trained | {"lora": {}}}))
    assert str(problem).startswith("trainer.train_vision: adapters leave everything beside them")
    assert contradictions_of(build_sft_config(trained)) == []
    (problem,) = contradictions_of(build_sft_config(trained | {"lora": {}}))
    assert str(problem).startswith("train_vision: adapters leave everything beside them")


@pytest.mark.parametrize("key", ["train_vision", "micro_batch_patches"])
def test_settings_of_images_are_refused_for_a_model_of_text(key: str) -> None:
    settings = TrainerConfig.model_validate({key: True if key == "train_vision" else 64})
    (problem,) = image_problems(("trainer",), settings, "m", {"model_type": "qwen3"})
    assert str(problem) == f"trainer.{key}: model 'm' (qwen3) trains on text alone; remove the key"
    assert [*image_problems((), settings, "m", {"vision_config": {}})] == []
    both_ways = {"use_bidirectional_attention": "vision"}
    unused = {"model_type": "gemma4", "vision_config": {}, "text_config": both_ways}
    assert len([*image_problems((), settings, "m", unused)]) == 1
    assert [*image_problems((), settings, "not here", {})] == []


@pytest.mark.parametrize(("counted", "is_refused"), [(70, False), (280, True)])
def test_a_processor_that_makes_other_tokens_than_the_engine_counts_is_refused(
    tmp_path: Path, counted: int, is_refused: bool
) -> None:
    config = {"model_type": "gemma4", "vision_config": {"default_output_length": counted}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": made}))
    found = [*image_problems((), TrainerConfig(), str(tmp_path), config)]
    assert [it.path for it in found] == [("model", "name")] * is_refused
    assert all("up to 70 tokens of an image" in it.message for it in found)
    assert [*image_problems((), build_sft_config(), str(tmp_path), config)] == []


@pytest.mark.parametrize(
    ("algo", "asking"),
    [
        ({"type": "grpo"}, ""),
        ({"type": "grpo", "reference": REFERENCE}, "grpo"),
        ({"type": "opd", "reference": REFERENCE}, "opd"),
        ({"type": "opsd", "demonstration": "answer"}, "opsd"),
        ({"type": "sft"}, "sft"),
    ],
)
def test_a_model_that_reads_images_may_learn_from_text_by_any_algorithm(
    tmp_path: Path, algo: dict[str, Any], asking: str
) -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = build_run_config(
        {"model": {"name": str(tmp_path)}, "orchestrator": {"train": {"algo": algo}}}
    )
    if asking in ("opd", "opsd"):
        assert [it for it in check(run) if "algo" in it.path] == []
    [source] = resolve_sources(run).train
    kind: Any = EnvironmentProcessConfig
    assert kind.model_construct(algo=source.complete.algo).asks_by_text == asking


@pytest.mark.skipif(has_module("torchao"), reason="it is installed")
def test_float8_needs_its_package() -> None:
    (problem,) = machine(ModelConfig(name="someone/else"), {}, float8=True)
    assert problem.startswith("parallel.float8: needs the package 'torchao'")

"""Adapters: what trains, what is stored, and that every reader computes the same policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build_micro_batch, build_sample
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gradus.config import AdamWConfig, LoraConfig, ModelConfig, learning
from gradus.errors import ConfigError
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.distributed import World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import (
    LoraLinear,
    adapted_layers,
    adapter_files,
    adapter_tensors,
    add_adapters,
)
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import save_model, serving_tensors
from gradus.trainer.step import GradientStep

pytestmark = pytest.mark.torch

LORA = LoraConfig(rank=4, alpha=8)
TOKENS = torch.tensor([[5, 9, 13, 21, 34, 55, 17, 8]])

Build = Callable[..., PolicyModel]


@pytest.fixture
def build_lora(tiny_model: Path, world: World) -> Build:
    """Builds the sharded tiny policy with adapters, computing in the dtype given."""

    def build(dtype: torch.dtype = torch.float32, lora: LoraConfig = LORA) -> PolicyModel:
        torch.manual_seed(0)
        model = load_model(ModelConfig(name=str(tiny_model)), world.device)
        add_adapters(model, lora, dtype)
        return shard_model(PolicyModel(model), world.mesh, dtype)

    return build


def train(policy: PolicyModel, world: World, *, steps: int = 3) -> list[float]:
    """The loss of each step on one batch."""
    step = GradientStep(policy, Dppo(learning.DppoConfig()), world)
    optimizer = PolicyOptimizer(
        policy, AdamWConfig(lr=1e-2), max_steps=steps, max_skipped_steps=1, world=world
    )
    batch = [build_sample(9, seed=1), build_sample(12, seed=2)]
    losses = []
    for number in range(steps):
        losses.append(step.run([build_micro_batch(batch)]).total)
        optimizer.step(number)
    return losses


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(TOKENS).logits
    return logits


def save(policy: PolicyModel, world: World, root: Path, base: Path) -> None:
    files = adapter_files(policy.model, LORA, str(base), None)
    save_model(policy.model, world, torch.float32, root / "adapter", files, is_adapter=True)
    files = {"config.json": (base / "config.json").read_bytes()}
    save_model(policy.model, world, torch.float32, root / "model", files)


def test_an_adapted_layer_is_the_base_plus_the_scaled_product() -> None:
    base = torch.nn.Linear(5, 3)
    layer = LoraLinear(base, rank=2, alpha=6)
    x = torch.randn(4, 5)
    assert torch.equal(layer(x), base(x))
    with torch.no_grad():
        layer.lora_B.copy_(torch.randn(3, 2))
    expected = base(x) + 3.0 * x @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected)
    merged = torch.nn.functional.linear(x, layer.merged(base.weight), base.bias)
    torch.testing.assert_close(layer(x), merged)


def test_only_adapters_train_with_float32_masters_over_a_frozen_bfloat16_base(
    build_lora: Build,
) -> None:
    policy = build_lora(torch.bfloat16)
    for name, parameter in policy.named_parameters():
        is_adapter = name.endswith(("lora_A", "lora_B"))
        assert parameter.requires_grad == is_adapter, name
        assert parameter.dtype == (torch.float32 if is_adapter else torch.bfloat16), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_moves_the_adapters_and_leaves_the_base(
    build_lora: Build, world: World, dtype: torch.dtype
) -> None:
    policy = build_lora(dtype)
    before = {n: p.full_tensor().detach().clone() for n, p in policy.named_parameters()}
    losses = train(policy, world)
    assert losses[-1] < losses[0]
    for name, parameter in policy.named_parameters():
        is_same = torch.equal(parameter.full_tensor(), before[name])
        assert is_same != name.endswith(("lora_A", "lora_B")), name


def test_gradients_are_those_of_the_merged_weight(
    build_lora: Build, build_policy: Build, world: World
) -> None:
    """At the start B = 0: dL/dB = scale · dL/dW Aᵀ and dL/dA = 0."""
    batch = [build_micro_batch([build_sample(9, seed=1)])]
    policy, full = build_lora(), build_policy()
    GradientStep(policy, Dppo(learning.DppoConfig()), world).run(batch)
    GradientStep(full, Dppo(learning.DppoConfig()), world).run(batch)
    for name, layer in adapted_layers(policy.model).items():
        dense = full.model.get_submodule(name).weight.grad.full_tensor()
        expected = layer.scale * dense @ layer.lora_A.full_tensor().detach().T
        torch.testing.assert_close(layer.lora_B.grad.full_tensor(), expected, atol=1e-5, rtol=1e-4)
        assert not layer.lora_A.grad.full_tensor().any()


def test_every_linear_layer_of_attention_and_mlp_is_a_default_target(build_lora: Build) -> None:
    leaves = {name.rpartition(".")[2] for name in adapted_layers(build_lora().model)}
    assert leaves == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_named_targets_are_adapted_alone(build_lora: Build) -> None:
    policy = build_lora(lora=LoraConfig(target_modules=["q_proj", "v_proj"]))
    leaves = {name.rpartition(".")[2] for name in adapted_layers(policy.model)}
    assert leaves == {"q_proj", "v_proj"}


def test_a_target_that_is_no_linear_layer_is_refused(build_lora: Build) -> None:
    with pytest.raises(ConfigError, match=r"\['q_porj'\].*q_proj"):
        build_lora(lora=LoraConfig(target_modules=["q_porj", "k_proj"]))


def test_adapter_and_merged_model_compute_the_trained_policy(
    build_lora: Build, world: World, tiny_model: Path, tmp_path: Path
) -> None:
    policy = build_lora()
    train(policy, world)
    save(policy, world, tmp_path, tiny_model)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert not torch.allclose(logits_of(merged), logits_of(base), atol=1e-2)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, parameter in merged.named_parameters():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        delta = torch.zeros(())
        if f"{prefix}.lora_A.weight" in adapter:
            delta = 2.0 * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
        expected = base.get_parameter(name) + delta
        torch.testing.assert_close(parameter, expected, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_the_adapter_and_computes_the_same(
    build_lora: Build, world: World, tiny_model: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    policy = build_lora()
    train(policy, world)
    save(policy, world, tmp_path, tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(logits_of(read), logits_of(merged), atol=1e-4, rtol=1e-4)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert set(peft.get_peft_model_state_dict(read)) == set(stored)


def test_merged_tensors_have_the_names_of_the_base(
    build_lora: Build, tiny_model: Path, world: World
) -> None:
    names = {name for name, _ in serving_tensors(build_lora().model, torch.bfloat16)}
    assert names == set(load_file(tiny_model / "model.safetensors"))


def test_ranks_that_do_not_write_keep_no_factor(build_lora: Build) -> None:
    assert list(adapter_tensors(build_lora().model, torch.bfloat16, keep=False)) == []


def test_an_adapter_of_a_tied_model_merges_without_its_head(world: World, tmp_path: Path) -> None:
    directory = build_tiny_model(
        tmp_path / "tied", hidden_size=32, num_layers=1, tie_word_embeddings=True
    )
    model = load_model(ModelConfig(name=str(directory)), world.device)
    add_adapters(model, LORA, torch.bfloat16)
    policy = shard_model(PolicyModel(model), world.mesh, torch.bfloat16)
    assert train(policy, world, steps=1)
    names = {name for name, _ in serving_tensors(policy.model, torch.bfloat16)}
    assert names == set(load_file(directory / "model.safetensors"))


def test_the_adapter_says_what_a_reader_must_know(build_lora: Build) -> None:
    files = adapter_files(build_lora().model, LORA, "some/model", "0ff1ce")
    assert json.loads(files["gradus_base.json"]) == {"sha256": "0ff1ce"}
    settings = json.loads(files["adapter_config.json"])
    assert (settings["r"], settings["lora_alpha"], settings["bias"]) == (4, 8, "none")
    assert settings["base_model_name_or_path"] == "some/model"
    assert settings["target_modules"] == sorted(settings["target_modules"])

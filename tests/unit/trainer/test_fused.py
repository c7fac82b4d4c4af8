"""The fused forms compute what transformers computes, and only where they are known to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3 import modeling_qwen3

from gradus.config import ModelConfig, ParallelConfig
from gradus.trainer.distributed import World
from gradus.trainer.model.cpu import fused
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model

pytestmark = pytest.mark.torch

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SHAPE)),
}


def build(name: str) -> PreTrainedModel:
    """Norm weights that are not all alike, so that a wrong one shows."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def build_fused(name: str) -> PreTrainedModel:
    model = build(name)
    fuse_layers(model)
    return model


def replaced(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


def logits_and_gradients(model: PreTrainedModel) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    logits = model(torch.randint(0, SHAPE["vocab_size"], (2, 17))).logits
    (logits.float() * torch.randn(logits.shape)).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_has_the_logits_and_gradients_of_the_plain_one(name: str) -> None:
    expected, gradients = logits_and_gradients(build(name))
    found, ours = logits_and_gradients(build_fused(name))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ours, gradients, strict=True):
        assert (mine - theirs).norm() <= 2e-6 * theirs.norm()


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_both_are_about_as_far_from_float32(name: str) -> None:
    exact, _ = logits_and_gradients(build(name))
    plain, _ = logits_and_gradients(build(name).bfloat16())
    found, _ = logits_and_gradients(build_fused(name).bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() <= 1.2 * (plain - exact).norm()


def test_known_modules_are_replaced_and_others_are_left_alone() -> None:
    assert replaced(build_fused("qwen3")) == {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"}
    # Its norms multiply by 1 + weight and its gate is a gelu; its rotation is the usual one.
    assert replaced(build_fused("gemma")) == {"GemmaAttention"}


def test_names_of_parameters_and_other_models_of_the_process_stay_as_they_are() -> None:
    before, rotation = build("qwen3"), modeling_qwen3.apply_rotary_pos_emb
    after = build_fused("qwen3")
    assert list(after.state_dict()) == list(before.state_dict())
    assert modeling_qwen3.apply_rotary_pos_emb is rotation
    assert not replaced(before)


def test_a_copy_of_a_fused_model_uses_its_own_weights() -> None:
    model = build_fused("qwen3")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2.0)
    plain = build("qwen3")
    plain.load_state_dict(twin.state_dict())
    expected, found = logits_and_gradients(plain)[0], logits_and_gradients(twin)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_gated_product_does_not_depend_on_its_blocks(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    leaves = [torch.randn(1, 7, 48, requires_grad=True) for _ in range(2)]
    whole = fused._Gate.apply(*leaves)
    expected = torch.autograd.grad(whole.sum(), leaves)
    monkeypatch.setattr(fused, "_BLOCK_ELEMENTS", rows * 48)
    found = fused._Gate.apply(*leaves)
    torch.testing.assert_close(found, whole)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_the_rotation_and_the_gated_product_are_those_of_differences() -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    angles = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    turn = lambda states: fused._Rotation.apply(states, angles.cos(), angles.sin())  # noqa: E731
    assert torch.autograd.gradcheck(turn, (leaf(1, 2, 3, 4),))
    assert torch.autograd.gradcheck(fused._Gate.apply, (leaf(2, 5), leaf(2, 5)))


def test_a_norm_that_is_not_trained_gets_no_gradient() -> None:
    hidden, weight = torch.randn(2, 3, 8, requires_grad=True), torch.ones(8)
    fused._Norm.apply(hidden, weight, 1e-6).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


class Shifted(torch.nn.Module):
    """Looks like a gated product, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(8, 8) for _ in range(3))
        self.act_fn = torch.nn.SiLU()
        self.norm = torch.nn.LayerNorm(8)
        self.shift = 0.1

    def forward(self, hidden: Tensor) -> Tensor:
        gated = self.act_fn(self.gate_proj(hidden)) * (self.up_proj(hidden) + self.shift)
        return self.down_proj(gated)


class Normed(Shifted):
    """Reads a layer that the known formula has no place for."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(super().forward(hidden))


@pytest.mark.parametrize("kind", [Shifted, Normed])
def test_a_module_that_only_looks_known_is_left_alone(kind: type[torch.nn.Module]) -> None:
    module = kind()
    fuse_layers(module)
    assert not replaced(module)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sharded_model_is_fused_unless_it_is_compiled(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr("gradus.trainer.model.shard.compile_layers", lambda layers, backend: None)
    model = load_model(ModelConfig(name=str(tiny_model)), world.device)
    parallel = ParallelConfig(compile=compiled)
    policy = shard_model(PolicyModel(model), world.mesh, torch.float32, parallel)
    assert ("Qwen3RMSNorm" in {k.removeprefix("FSDP") for k in replaced(policy)}) is not compiled

"""One step by the code that a GPU runs is the step that a CPU computes by its own.

Both paths really compute: the GPU's with plain forms of the two operations that only CUDA has
(`gpu_stand_in`), with CUDA's blocks of logits and without the forms for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders import build_micro_batch
from gpu_stand_in import stand_in_gpu
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM

from gradus.config import AdamWConfig, LoraConfig, ModelConfig, ParallelConfig, learning
from gradus.trainer.distributed import CPU, World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.gpu.offload import InputStore
from gradus.trainer.model.kernels import Platform
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import TrainTensors
from gradus.wire.packing import pack

pytestmark = [
    pytest.mark.torch,
    # Dynamo itself looks at the gradient of the hidden states.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

WINDOW = 5
SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
    "deepseek_v3": {
        **{
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
        },
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
    },
    "qwen3_5_text": {
        **{"linear_num_value_heads": 2, "linear_num_key_heads": 1},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mamba2": {
        **{"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    },
}
NO_FLASH = {"gemma2": 2, "qwen3_5_text": 1, "mamba2": 2}
"""How many of two layers attend in another way, or carry state."""
LENGTHS = (13, 3, 21, 8)
"""Shorter and longer than the window."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """Large random weights, so that attention and experts choose."""
    found = {}
    for family, options in FAMILIES.items():
        folder = tmp_path_factory.mktemp("model") / family
        torch.manual_seed(0)
        defaults = AutoConfig.for_model(family)
        shape = {name: value for name, value in SHAPE.items() if hasattr(defaults, name)}
        config = AutoConfig.for_model(family, **(shape | options))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_((0.3 if parameter.ndim > 1 else 0.05) * torch.randn_like(parameter))
        model.save_pretrained(folder)
        limit = SHAPE["max_position_embeddings"]
        found[family] = ModelConfig(name=str(folder), max_length_tokens=limit)
    return found


TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""7.6e-6 of the norm: a number passes some 32 operations on its way forward and as many back (two
layers of products, norms, attention and activations; the head; the loss), and each may round in
another order than on the CPU. Which orders they are depends on the processor."""


@dataclass(frozen=True)
class Stepped:
    """What one step computed."""

    loss: float
    grad_norm: float
    logprobs: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how."""

    model: ModelConfig
    world: World
    samples: Any
    dtype: torch.dtype = torch.float32
    has_lora: bool = False

    def step(self, platform: Platform | None, **parallel: Any) -> Stepped:
        """Forward, loss, backward and a clipped update of two micro batches."""
        torch.manual_seed(1)
        model = load_model(self.model, CPU)
        if self.has_lora:
            add_adapters(model, LoraConfig(rank=4), self.dtype)
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    torch.nn.init.normal_(parameter, std=0.1)
        choices = ParallelConfig(**parallel)
        policy = PolicyModel(model, platform=platform)
        shard_model(policy, self.world.mesh, self.dtype, choices)
        (micro_batches,) = pack(self.samples(LENGTHS, seed=3), max_tokens=26, num_ranks=1)
        assert len(micro_batches) > 1
        with torch.no_grad():
            logprobs = policy(TrainTensors.build(micro_batches[0], CPU)).logprobs
        # eps makes an update as smooth as its gradient: no sign of a number near 0 decides.
        optimizer = PolicyOptimizer(
            policy,
            AdamWConfig(lr=1e-2, eps=1e-2, max_grad_norm=0.1),
            max_steps=1,
            max_skipped_steps=1,
            world=self.world,
        )
        loss = GradientStep(policy, Dppo(learning.DppoConfig()), self.world).run(micro_batches)
        gradients = {
            name: p.grad.full_tensor().clone()  # type: ignore[attr-defined]
            for name, p in policy.named_parameters()
            if p.grad is not None
        }
        update = optimizer.step(0)
        assert update.grad_norm > 0.1, "nothing is clipped"
        weights = {n: p.full_tensor().detach() for n, p in policy.named_parameters()}  # type: ignore[attr-defined]
        return Stepped(loss.total, update.grad_norm, logprobs, gradients, weights)


def largest_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of any element, relative to the norm of all."""
    assert found.keys() == expected.keys()
    norm = torch.stack([e.norm() for e in expected.values()]).norm()
    return max(float((found[n] - expected[n]).abs().max() / norm) for n in expected)


def assert_same(found: Stepped, expected: Stepped, *, tolerance: float = TOLERANCE) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=10 * tolerance, abs=tolerance)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * tolerance)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=10 * tolerance)
    assert largest_distance(found.gradients, expected.gradients) < tolerance
    assert largest_distance(found.weights, expected.weights) < tolerance


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False},
    "selective": {"compile": False, "activation_checkpointing": "selective"},
    "full": {"compile": False, "activation_checkpointing": "full"},
    "compiled, selective": {"activation_checkpointing": "selective"},
    "compiled, full": {"activation_checkpointing": "full"},
}
"""A GPU compiles unless it is told not to."""
slow = pytest.mark.slow
PLAIN = ("qwen3", "llama", "gemma3_text", "qwen3_moe")
CASES = [
    *((family, way) for family in PLAIN for way in ("plain", "selective", "full")),
    *((family, "full") for family in FAMILIES if family not in PLAIN),
    pytest.param("gpt_oss", "selective", marks=slow),
    pytest.param("qwen3_5_text", "compiled, full", marks=slow),
    pytest.param("gemma3_text", "compiled, selective", marks=slow),
    pytest.param("qwen3_moe", "compiled, full", marks=slow),
]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_step_in_float32_is_that_of_the_cpu(
    models: Any, world: World, ragged_samples: Any, family: str, way: str
) -> None:
    recipe = Recipe(models[family], world, ragged_samples)
    gpu, calls = stand_in_gpu(takes_float32=True)
    torch._dynamo.reset()
    found = recipe.step(gpu, **WAYS[way])
    assert_same(found, recipe.step(None))
    # Each of two layers attends in a forward without gradient, and in those of two micro batches.
    assert calls.varlen >= (2 - NO_FLASH.get(family, 0)) * 3


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen3", "plain"),
        ("gemma3_text", "full"),
        pytest.param("qwen3", "compiled, selective", marks=slow),
    ],
)
def test_a_step_of_adapters_is_that_of_the_cpu(
    models: Any, world: World, ragged_samples: Any, family: str, way: str
) -> None:
    recipe = Recipe(models[family], world, ragged_samples, has_lora=True)
    gpu, _ = stand_in_gpu(takes_float32=True)
    torch._dynamo.reset()
    found = recipe.step(gpu, **WAYS[way])
    assert all("lora" in name for name in found.gradients)
    assert_same(found, recipe.step(None))


def test_inputs_of_layers_that_wait_elsewhere_come_back_bit_by_bit(
    models: Any, world: World, ragged_samples: Any
) -> None:
    recipe = Recipe(models["qwen3"], world, ragged_samples)
    way = {"compile": False, "activation_checkpointing": "full"}
    kept, moved = CountingStore(), CountingStore()
    gpu, _ = stand_in_gpu(takes_float32=True)
    plain = recipe.step(replace(gpu, inputs=kept), **way)
    found = recipe.step(replace(gpu, inputs=moved), offload_activations=True, **way)
    assert found.loss == plain.loss
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, found.gradients[name])
    for name, weight in plain.weights.items():
        assert torch.equal(weight, found.weights[name])
    # One per layer and micro batch; without the option none.
    assert (kept.moved, moved.moved) == (0, 2 * 2)


class CountingStore(InputStore):
    """Counts the tensors that it moves."""

    def __init__(self) -> None:
        super().__init__(least_elements=1)
        self.moved = 0

    def take(self, kept: Any) -> Tensor:
        tensor = super().take(kept)
        self.moved += tensor.ndim == 3
        return tensor


@slow
def test_lengths_and_layers_share_compiled_code(
    models: Any, world: World, ragged_samples: Any
) -> None:
    """Before and after attention, in the forward alone and in that of a step; two for the head."""
    counter = CompileCounterWithBackend("eager")
    gpu, _ = stand_in_gpu(takes_float32=True)
    torch._dynamo.reset()
    policy = PolicyModel(
        load_model(models["qwen3"], CPU), platform=replace(gpu, compile_backend=counter)
    )
    shard_model(policy, world.mesh, torch.float32, ParallelConfig())
    step = GradientStep(policy, Dppo(learning.DppoConfig()), world)
    for lengths in ([9, 4], [5], [20, 3, 2], [7, 7, 7, 7, 1], [6], [60, 50]):
        step.run([build_micro_batch(ragged_samples(lengths))])
        assert counter.frame_count == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_bfloat16_is_as_near_to_float32_as_that_of_the_cpu(
    models: Any, world: World, ragged_samples: Any, family: str
) -> None:
    """By the real choice of kernels: flash attention, float32 sums of the output layer."""
    exact = Recipe(models[family], world, ragged_samples).step(None)
    recipe = Recipe(models[family], world, ragged_samples, dtype=torch.bfloat16)
    gpu, calls = stand_in_gpu()
    here, there = recipe.step(None), recipe.step(gpu, compile=False)
    for found in (here, there):
        assert found.loss == pytest.approx(exact.loss, rel=0.1, abs=0.05)
    ours, theirs = (largest_distance(it.gradients, exact.gradients) for it in (there, here))
    assert ours < max(1.5 * theirs, 0.02)
    assert (calls.varlen == 0) == (NO_FLASH.get(family) == 2)
    assert calls.widening > 0

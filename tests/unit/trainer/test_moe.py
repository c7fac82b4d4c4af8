"""A mixture of experts trains like any model and is published under the names that vLLM loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gradus.config.model import ModelConfig
from gradus.config.optimizer import AdamWConfig
from gradus.errors import ConfigError
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus.trainer.distributed import World
from gradus.trainer.losses.trust_region import Dppo
from gradus.trainer.model.load import load_model, refuse_leaking_layers
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.serving_names import serving_tensors
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack

pytestmark = pytest.mark.torch

NUM_EXPERTS = 4


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts, two for each token, float32."""
    folder = tmp_path_factory.mktemp("model") / "moe"
    tokenizer = build_tiny_tokenizer(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    torch.nn.Module.to(model, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(moe_model: Path, world: World) -> PolicyModel:
    model = load_model(ModelConfig(name=str(moe_model)), world.device)
    return shard_model(PolicyModel(model), world.mesh, torch.float32)


def test_experts_run_as_grouped_matrix_products(policy: PolicyModel) -> None:
    assert policy.model.config._experts_implementation == "grouped_mm"


def test_loss_and_gradient_are_those_of_experts_one_by_one(
    policy: PolicyModel,
    world: World,
    moe_model: Path,
    build_reference: Any,
    ragged_samples: Any,
) -> None:
    samples = ragged_samples([11, 4, 17])
    (micro_batches,) = pack(samples, max_tokens=24, num_ranks=1)
    loss = GradientStep(policy, Dppo(), world).run(micro_batches)
    reference = build_reference(moe_model)
    reference.model.set_experts_implementation("eager")
    total, expected = reference.loss(samples)
    assert loss.total == pytest.approx(total, rel=1e-4, abs=1e-5)
    norm = sum(float((g**2).sum()) for g in expected.values()) ** 0.5
    for name, parameter in policy.model.named_parameters():
        found = parameter.grad.full_tensor().numpy()
        assert abs(found - expected[name]).max() / norm < 2e-5, name


def test_a_step_is_published_expert_by_expert(
    policy: PolicyModel, world: World, moe_model: Path, ragged_samples: Any
) -> None:
    optimizer = PolicyOptimizer(
        policy, AdamWConfig(lr=1e-3), max_steps=1, max_skipped_steps=1, world=world
    )
    (micro_batches,) = pack(ragged_samples([30, 30]), max_tokens=64, num_ranks=1)
    GradientStep(policy, Dppo(), world).run(micro_batches)
    optimizer.step(0)
    published = dict(serving_tensors(policy.model, torch.float32))
    before = load_file(moe_model / "model.safetensors")
    assert published.keys() == before.keys()
    expert = f"model.layers.1.mlp.experts.{NUM_EXPERTS - 1}.down_proj.weight"
    assert published[expert].shape == before[expert].shape == (64, 48)
    assert not torch.equal(published[expert], before[expert])


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_would_mix_packed_samples_are_refused(moe_model: Path, kind: str) -> None:
    model = load_model(ModelConfig(name=str(moe_model)), torch.device("cpu"))
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(ConfigError, match=kind):
        refuse_leaking_layers(model)

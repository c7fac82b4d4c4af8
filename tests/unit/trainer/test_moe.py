"""A mixture of experts trains like any model and is published under the names that vLLM loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_experts import EXPERT_SIZE, NUM_EXPERTS, build_tiny_moe_model

from gradus.config import AdamWConfig, ModelConfig, learning
from gradus.errors import ConfigError
from gradus.trainer.distributed import World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.experts.products import EXPERTS_NAME
from gradus.trainer.model.load import load_model, refuse_leaking_layers
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import serving_tensors
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack

pytestmark = pytest.mark.torch

Gradients = dict[str, np.ndarray]
SPLIT = {"expert_parallel_size": 2}
TOLERANCE = 2e-5
"""Float32 against float64, relative to the norm of all gradients."""


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float32."""
    return build_tiny_moe_model(tmp_path_factory.mktemp("model") / "moe", dtype=torch.float32)


@pytest.fixture(scope="module")
def moe_reference(build_reference: Any, moe_model: Path) -> Any:
    """Computes experts one by one."""
    reference = build_reference(moe_model)
    reference.model.set_experts_implementation("eager")
    return reference


@pytest.fixture
def policy(moe_model: Path, world: World) -> PolicyModel:
    model = load_model(ModelConfig(name=str(moe_model)), world.device)
    return shard_model(PolicyModel(model), world.mesh, torch.float32)


def test_experts_run_as_grouped_matrix_products(policy: PolicyModel) -> None:
    assert policy.model.config._experts_implementation == EXPERTS_NAME


def test_loss_and_gradient_are_those_of_experts_one_by_one(
    policy: PolicyModel, world: World, moe_reference: Any, ragged_samples: Any
) -> None:
    samples = ragged_samples([11, 4, 17])
    (micro_batches,) = pack(samples, max_tokens=24, num_ranks=1)
    loss = GradientStep(policy, Dppo(learning.DppoConfig()), world).run(micro_batches)
    total, expected = moe_reference.loss(samples)
    assert loss.total == pytest.approx(total, rel=1e-4, abs=1e-5)
    named = policy.model.named_parameters()
    found = {name: parameter.grad.full_tensor().numpy() for name, parameter in named}
    assert largest_distance(found, expected) < TOLERANCE


def largest_distance(found: Gradients, expected: Gradients) -> float:
    assert found.keys() == expected.keys()
    norm = sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()) ** 0.5
    return max(float(abs(found[name] - expected[name]).max()) for name in found) / norm


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    max_tokens=st.integers(16, 60),
    is_packed=st.booleans(),
    parallel=st.sampled_from(
        [
            {},
            {"replicate_size": 2},
            {"context_parallel_size": 2},
            SPLIT,
            SPLIT | {"gradient_sync": "each"},
            SPLIT | {"context_parallel_size": 2},
            SPLIT | {"activation_checkpointing": "full"},
            SPLIT | {"activation_checkpointing": "selective"},
        ]
    ),
)
def test_experts_split_over_two_ranks_give_the_plain_loss_and_gradient(
    ranks: Any,
    moe_model: Path,
    moe_reference: Any,
    ragged_samples: Any,
    lengths: list[int],
    seed: int,
    max_tokens: int,
    is_packed: bool,
    parallel: dict[str, Any],
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    total, expected = moe_reference.loss(samples)
    answer, found = ranks.run(
        [samples], max_tokens=max_tokens, is_packed=is_packed, model=moe_model, **parallel
    )
    assert answer["total"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    if any(gradient.any() for gradient in expected.values()):
        assert largest_distance(found, expected) < TOLERANCE


def test_no_loss_of_the_router_is_added_whatever_the_model_asks_for(
    tmp_path: Path, world: World, policy: PolicyModel, ragged_samples: Any
) -> None:
    """A balancing term would pull experts towards even use on the batch at hand, and the policy
    away from the one that was sampled."""
    asking = build_tiny_moe_model(
        tmp_path / "moe", dtype=torch.float32, output_router_logits=True, router_aux_loss_coef=10.0
    )
    other = load_model(ModelConfig(name=str(asking)), world.device)
    with_term = shard_model(PolicyModel(other), world.mesh, torch.float32)
    (micro_batches,) = pack(ragged_samples([11, 4, 17]), max_tokens=24, num_ranks=1)
    totals = [
        GradientStep(p, Dppo(learning.DppoConfig()), world).run(micro_batches).total
        for p in (policy, with_term)
    ]
    assert totals[0] == totals[1]
    pairs = zip(policy.parameters(), with_term.parameters(), strict=True)
    for plain, asked in pairs:
        assert torch.equal(plain.grad.full_tensor(), asked.grad.full_tensor())  # type: ignore[union-attr]


def test_a_step_is_published_expert_by_expert(
    policy: PolicyModel, world: World, moe_model: Path, ragged_samples: Any
) -> None:
    optimizer = PolicyOptimizer(
        policy, AdamWConfig(lr=1e-3), max_steps=1, max_skipped_steps=1, world=world
    )
    (micro_batches,) = pack(ragged_samples([30, 30]), max_tokens=64, num_ranks=1)
    GradientStep(policy, Dppo(learning.DppoConfig()), world).run(micro_batches)
    optimizer.step(0)
    published = dict(serving_tensors(policy.model, torch.float32))
    before = load_file(moe_model / "model.safetensors")
    assert published.keys() == before.keys()
    expert = f"model.layers.1.mlp.experts.{NUM_EXPERTS - 1}.down_proj.weight"
    assert published[expert].shape == before[expert].shape == (64, EXPERT_SIZE)
    assert not torch.equal(published[expert], before[expert])


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_would_mix_packed_samples_are_refused(moe_model: Path, kind: str) -> None:
    model = load_model(ModelConfig(name=str(moe_model)), torch.device("cpu"))
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(ConfigError, match=kind):
        refuse_leaking_layers(model)

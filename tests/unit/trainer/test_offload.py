"""Where parameters live, decided without a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from builders import build_micro_batch
from gpu_stand_in import HOPPER
from torch.distributed.fsdp import CPUOffloadPolicy

from gradus.config import ModelConfig, ParallelConfig, learning
from gradus.trainer.losses import Dppo
from gradus.trainer.model.kernels import DeviceFacts
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import _offload_policy, shard_model
from gradus.trainer.step import GradientStep

pytestmark = pytest.mark.torch

OFFLOADED = ParallelConfig(offload_optimizer=True)


def test_a_gpu_keeps_shards_in_pinned_memory_of_the_cpu() -> None:
    policy = _offload_policy(OFFLOADED, HOPPER)
    assert isinstance(policy, CPUOffloadPolicy)
    assert policy.pin_memory


@pytest.mark.parametrize("facts", [DeviceFacts("cpu"), HOPPER])
def test_without_the_option_nothing_moves(facts: DeviceFacts) -> None:
    assert not isinstance(_offload_policy(ParallelConfig(), facts), CPUOffloadPolicy)


def test_a_cpu_says_that_the_option_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = _offload_policy(OFFLOADED, DeviceFacts("cpu"))
    assert not isinstance(policy, CPUOffloadPolicy)
    assert "offload_optimizer does nothing here" in caplog.text


def test_on_a_cpu_the_gradient_is_the_same_bit_by_bit(
    tiny_model: Any, world: Any, ragged_samples: Any
) -> None:
    batch = [build_micro_batch(ragged_samples([9, 4, 15]))]
    gradients = []
    for parallel in (ParallelConfig(), OFFLOADED):
        model = load_model(ModelConfig(name=str(tiny_model)), world.device)
        policy = shard_model(PolicyModel(model), world.mesh, torch.float32, parallel)
        GradientStep(policy, Dppo(learning.DppoConfig()), world).run(batch)
        gradients.append([p.grad.full_tensor() for p in policy.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_model_is_loaded_into_memory_of_the_cpu_whatever_will_train_it(tiny_model: Any) -> None:
    """Whole on a GPU, a large one would not fit before it is sharded."""
    model = load_model(ModelConfig(name=str(tiny_model)), torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"cpu"}

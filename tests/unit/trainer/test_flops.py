"""What a step needs, counted by hand for a model that fits on paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample

from gradus.config import LoraConfig, ModelConfig
from gradus.trainer.distributed import World
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.throughput import ModelFlops, causal_pairs, peak_teraflops
from gradus.wire.packing import build_dummy

pytestmark = pytest.mark.torch

# The tiny model: hidden 96, 2 layers, 3 heads of 32 that share 1 key head, 256 in the middle.
LAYER_WEIGHTS = 96 * 96 + 2 * 96 * 32 + 96 * 96 + 3 * 96 * 256


@pytest.fixture
def model(tiny_model: Path, world: World) -> torch.nn.Module:
    return load_model(ModelConfig(name=str(tiny_model)), world.device)


def test_operations_of_one_sample_are_those_counted_by_hand(model: torch.nn.Module) -> None:
    micro_batch = build_micro_batch([build_sample(10, prompt_length=4)])
    layers = 6 * 2 * LAYER_WEIGHTS * 10
    head = 6 * 96 * model.config.vocab_size * 6
    attention = 12 * 2 * 3 * 32 * 55
    assert ModelFlops.of(model).of_step([micro_batch]) == layers + head + attention


def test_a_dummy_needs_nothing(model: torch.nn.Module) -> None:
    assert ModelFlops.of(model).of_step([build_dummy(build_sample())]) == 0


def test_two_samples_in_a_row_do_not_attend_to_each_other(model: torch.nn.Module) -> None:
    flops, samples = ModelFlops.of(model), [build_sample(9), build_sample(5, seed=1)]
    together = flops.of_step([build_micro_batch(samples)])
    assert together == flops.of_step([build_micro_batch([sample]) for sample in samples])


def test_a_sharded_model_counts_alike(tiny_model: Path, world: World) -> None:
    model = load_model(ModelConfig(name=str(tiny_model)), world.device)
    whole = ModelFlops.of(model)
    shard_model(PolicyModel(model), world.mesh, torch.float32)
    assert ModelFlops.of(model) == whole


def test_frozen_weights_need_no_gradient_of_their_own(model: torch.nn.Module) -> None:
    full = ModelFlops.of(model)
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    adapted = ModelFlops.of(model)
    assert full.per_token * 4 / 6 < adapted.per_token < full.per_token
    assert adapted.per_target == full.per_target * 4 / 6


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 12, 50])
def test_pairs_are_those_of_the_mask(window: int | None, chunk: int | None) -> None:
    query, key = np.indices((12, 12))
    is_seen = (key <= query) & (query - key < (window or 12))
    is_seen &= query // (chunk or 12) == key // (chunk or 12)
    assert causal_pairs(12, window, chunk) == is_seen.sum()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GB200", 2500.0),
        ("A toaster", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, peak: float | None) -> None:
    assert peak_teraflops(name) == peak

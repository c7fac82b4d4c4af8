"""The same recorded batches give the same weights, bit by bit, in deterministic mode."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import build_loss_config

from gradus.config import AdamWConfig, ModelConfig
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.losses import build_loss
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.wire.codec import decode_rank_batch, encode
from gradus.wire.micro_batch import MicroBatch, RankBatch
from gradus.wire.packing import pack
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch

STEPS = 3
OPTIONS = {"entropy_coefficient": 0.01, "reference_kl_coefficient": 0.01}


@pytest.fixture(scope="module")
def recorded(ragged_samples: Any) -> list[bytes]:
    """Batches as they came off the wire."""
    batches = []
    for step in range(STEPS):
        samples = ragged_samples([14, 3, 9, 22, 5, 17, 300, 200, 150], seed=step)
        micro_batches = pack(samples, max_tokens=300, num_ranks=1)[0]
        batches.append(encode(RankBatch(step, 0, 0, VersionSpan(0, step), micro_batches)))
    return batches


def read(batch: bytes) -> list[MicroBatch]:
    return decode_rank_batch(batch).micro_batches


def train(
    model: Path,
    batches: list[list[MicroBatch]],
    *,
    loss: str,
    dtype: torch.dtype,
) -> tuple[str, list[float]]:
    """Digest of the weights after all steps, and the loss of every step."""
    with join_world(CPU, deterministic=True) as world:
        policy = PolicyModel(load_model(ModelConfig(name=str(model)), world.device))
        policy = shard_model(policy, world.mesh, dtype)
        step = GradientStep(policy, build_loss(build_loss_config(loss, **OPTIONS)), world)
        optimizer = PolicyOptimizer(
            policy, AdamWConfig(lr=1e-3), max_steps=STEPS, max_skipped_steps=1, world=world
        )
        losses = []
        for number, micro_batches in enumerate(batches):
            losses.append(step.run(micro_batches).total)
            optimizer.step(number)
        digest = hashlib.sha256()
        for name, parameter in sorted(policy.model.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.full_tensor().detach().numpy().tobytes())  # type: ignore[attr-defined]
    return digest.hexdigest(), losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("loss", ["dppo", "gspo"])
def test_training_on_recorded_batches_repeats_bit_by_bit(
    tiny_model: Path, recorded: list[bytes], loss: str, dtype: torch.dtype
) -> None:
    first, second = (
        train(tiny_model, [read(batch) for batch in recorded], loss=loss, dtype=dtype)
        for _ in range(2)
    )
    assert first == second
    assert np.isfinite(first[1]).all()


def test_other_work_in_between_changes_nothing(tiny_model: Path, recorded: list[bytes]) -> None:
    """Neither random state nor the number of threads of the caller enters."""
    batches = [read(batch) for batch in recorded]
    first = train(tiny_model, batches, loss="dppo", dtype=torch.float32)
    torch.manual_seed(7)
    torch.rand(5)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    second = train(tiny_model, batches, loss="dppo", dtype=torch.float32)
    torch.set_num_threads(threads)
    assert first == second


def test_another_order_of_micro_batches_gives_other_last_bits(
    tiny_model: Path, recorded: list[bytes]
) -> None:
    """What is not promised: sums in another order. It shows that the digest sees the last bit."""
    batches = [read(batch) for batch in recorded]
    assert max(map(len, batches)) > 2  # a + b is b + a
    kept = train(tiny_model, batches, loss="dppo", dtype=torch.float32)
    turned = train(tiny_model, [b[::-1] for b in batches], loss="dppo", dtype=torch.float32)
    assert kept[0] != turned[0]
    assert kept[1] == pytest.approx(turned[1], rel=1e-4)

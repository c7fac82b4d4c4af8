"""Invariant 6: packing, micro-batching and ranks change neither the loss nor the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.testing.builders import build_micro_batch, build_sample
from gradus.wire.packing import build_dummy, pack

pytestmark = pytest.mark.torch

TOLERANCE = 2e-5
"""Float32 against float64, relative to the norm of all gradients; sums run in another order."""


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    max_tokens=st.integers(20, 70),
    num_ranks=st.integers(1, 3),
)
def test_any_packing_gives_the_loss_and_gradient_of_the_plain_samples(
    bench: Any,
    ragged_samples: Any,
    reference: Any,
    lengths: list[int],
    seed: int,
    max_tokens: int,
    num_ranks: int,
) -> None:
    samples = ragged_samples(lengths, seed=seed)
    ranks = pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    result = bench.step.run([m for micro_batches in ranks for m in micro_batches])
    total, gradients = reference.loss(samples)
    assert result.total == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert bench.distance(bench.take_gradients(), gradients) < TOLERANCE


def test_members_are_counted_over_all_micro_batches(bench: Any) -> None:
    samples = [build_sample(6, prompt_length=2), build_sample(9, prompt_length=3, seed=1)]
    result = bench.step.run([build_micro_batch([s]) for s in samples])
    bench.take_gradients()
    assert result.members == {"rl": 4 + 6, "ce": 0, "ref_kl": 0, "ce_batch": 0}
    assert result.tokens == 15


def test_the_first_token_of_a_sample_never_trains(bench: Any) -> None:
    result = bench.step.run([build_micro_batch([build_sample(4, prompt_length=0)])])
    bench.take_gradients()
    assert result.members["rl"] == 3


def test_a_token_outside_the_loss_mask_never_trains(bench: Any) -> None:
    sample = build_sample(5, prompt_length=3)
    sample.loss_weights["rl"][:] = 1.0
    result = bench.step.run([build_micro_batch([sample])])
    bench.take_gradients()
    assert result.members["rl"] == 2


def test_a_dummy_takes_part_in_backward_and_adds_nothing(bench: Any) -> None:
    micro_batch, dummy = build_micro_batch(), build_dummy(build_sample())
    bench.step.run([micro_batch])
    alone = bench.take_gradients()
    result = bench.step.run([micro_batch, dummy])
    together = bench.take_gradients()
    assert bench.distance(alone, together) == 0
    assert result.tokens == len(micro_batch)


def test_a_step_of_dummies_has_zero_gradients_everywhere(bench: Any) -> None:
    result = bench.step.run([build_dummy(build_sample())])
    assert result.total == 0
    assert all(not g.any() for g in bench.take_gradients().values())


def test_samples_longer_than_the_matrix_path_agree_with_the_plain_loss(
    bench: Any, ragged_samples: Any, reference: Any
) -> None:
    samples = ragged_samples([300, 5, 270, 257])
    result = bench.step.run([build_micro_batch(samples)])
    total, gradients = reference.loss(samples)
    assert result.total == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert bench.distance(bench.take_gradients(), gradients) < TOLERANCE


def test_another_sample_in_the_row_changes_no_metric(bench: Any) -> None:
    first, other = build_sample(7, seed=1), build_sample(11, seed=2)
    other.loss_weights["rl"][:] = 0.0
    alone = bench.step.run([build_micro_batch([first])])
    beside = bench.step.run([build_micro_batch([other, first])])
    for name in ("loss/rl/mean", "loss/entropy/mean", "loss/mismatch_kl/mean"):
        assert beside.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-5)


def test_bf16_compute_stays_near_the_plain_loss(
    build_bench: Any, ragged_samples: Any, reference: Any
) -> None:
    bench = build_bench(torch.bfloat16)
    samples = ragged_samples([12, 7, 15])
    result = bench.step.run([build_micro_batch(samples)])
    total, gradients = reference.loss(samples)
    assert result.total == pytest.approx(total, rel=0.02)
    found = bench.take_gradients()
    assert all(np.isfinite(g).all() for g in found.values())
    assert bench.distance(found, gradients) < 0.02

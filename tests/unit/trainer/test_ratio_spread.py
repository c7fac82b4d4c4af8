"""Percentiles of the importance ratio, from counts that micro batches and ranks add up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.config import learning
from gradus.trainer.distributed import World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.policy_model import TokenScores
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch

pytestmark = pytest.mark.torch


def moved_by(log_ratios: np.ndarray) -> Callable[[TrainTensors], TokenScores]:
    """A policy whose tokens are that much likelier than when they were sampled, one after another;
    tokens that were not sampled are left alone."""
    weight = torch.zeros((), requires_grad=True)
    left = iter(log_ratios)

    def score(tensors: TrainTensors) -> TokenScores:
        is_member = tensors.weights["rl"] != 0
        moved = torch.zeros_like(tensors.sampling_logprobs)
        for index in torch.arange(len(is_member))[is_member]:
            moved[index] = float(next(left))
        logprobs = tensors.sampling_logprobs + moved + weight
        return TokenScores(logprobs, torch.zeros_like(logprobs) + weight)

    return score


def batches(num_tokens: list[int]) -> list[MicroBatch]:
    return [
        build_micro_batch([build_sample(n + 2, prompt_length=2, seed=seed)])
        for seed, n in enumerate(num_tokens)
    ]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_tokens=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    scale=st.sampled_from([1e-4, 1e-2, 0.3]),
    seed=st.integers(0, 99),
)
def test_percentiles_are_those_of_all_tokens_within_the_width_of_a_count(
    world: World, num_tokens: list[int], scale: float, seed: int
) -> None:
    log_ratios = np.random.default_rng(seed).normal(0.0, scale, sum(num_tokens))
    step = GradientStep(moved_by(log_ratios), Dppo(learning.DppoConfig()), world)
    metrics = step.run(batches(num_tokens)).metrics
    mismatch = np.exp(log_ratios) - log_ratios - 1.0
    for percent in (5, 50, 95):
        exact = np.percentile(log_ratios, percent, method="inverted_cdf")
        found = np.log(metrics[f"loss/ratio/p{percent}"])
        assert found == pytest.approx(exact, rel=0.05, abs=2e-5)
    for percent in (50, 95):
        exact = np.percentile(mismatch, percent, method="inverted_cdf")
        assert metrics[f"loss/mismatch_kl/p{percent}"] == pytest.approx(exact, rel=0.1, abs=1e-9)
    assert metrics["loss/mismatch_kl/max"] == pytest.approx(mismatch.max(), rel=0.01, abs=1e-6)
    ratios = np.exp(log_ratios)
    share = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    assert metrics["loss/effective_tokens/share"] == pytest.approx(share, rel=0.05)


@pytest.mark.shows("F40")
def test_what_no_float_holds_counts_with_the_largest_and_ends_nothing(world: World) -> None:
    log_ratios = np.array([0.0, 0.0, np.nan, np.inf, -np.inf, 300.0])
    step = GradientStep(moved_by(log_ratios), Dppo(learning.DppoConfig()), world)
    metrics = step.run(batches([6])).metrics
    assert metrics["loss/ratio/p5"] == pytest.approx(np.exp(-20.0), rel=0.5)
    assert metrics["loss/ratio/p50"] == 1.0
    assert metrics["loss/ratio/p95"] == pytest.approx(np.exp(20.0), rel=0.5)
    assert metrics["loss/effective_tokens/share"] == pytest.approx(3 / 6, rel=0.1)


def test_a_batch_without_rl_tokens_has_no_ratio(world: World) -> None:
    sample = build_sample(6)
    sample.arrays.loss_weights["ce"] = sample.arrays.loss_weights.pop("rl")
    step = GradientStep(moved_by(np.zeros(0)), Dppo(learning.DppoConfig()), world)
    metrics = step.run([build_micro_batch([sample])]).metrics
    assert not [name for name in metrics if "ratio" in name or "mismatch" in name]

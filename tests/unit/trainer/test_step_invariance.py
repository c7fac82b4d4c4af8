"""Invariant 6: packing, micro-batching and ranks change neither the loss nor the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from configs import build_loss_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.config import learning
from gradus.config.schema.learning import LossConfig
from gradus.errors import ConfigError
from gradus.trainer.losses import Dppo, LossInputs, LossOutput, build_loss
from gradus.trainer.step import GradientStep
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


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    max_tokens=st.integers(20, 70),
    num_ranks=st.integers(1, 3),
)
def test_sequence_mean_is_the_mean_over_samples_of_their_own_means(
    bench: Any, world: Any, lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    """A sample with nothing to train does not count; any packing gives the same."""
    samples = [build_sample(n, seed=i, advantage=i - 1.5) for i, n in enumerate([8, *lengths])]
    trained = [sample for sample in samples if sample.arrays.loss_mask[1:].any()]
    alone = [bench.step.run([build_micro_batch([sample])]) for sample in trained]
    gradients = bench.take_gradients()
    expected = {name: gradient / len(trained) for name, gradient in gradients.items()}
    ranks = pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    step = GradientStep(
        bench.policy, Dppo(learning.DppoConfig()), world, aggregation="sequence_mean"
    )
    result = step.run([m for micro_batches in ranks for m in micro_batches])
    mean = sum(one.total for one in alone) / len(trained)
    assert result.total == pytest.approx(mean, rel=1e-4, abs=1e-5)
    assert bench.distance(bench.take_gradients(), expected) < TOLERANCE


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    branches=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    max_tokens=st.integers(20, 70),
    num_ranks=st.integers(1, 3),
)
def test_trace_mean_is_the_mean_over_traces_however_they_branch(
    bench: Any, world: Any, branches: list[int], max_tokens: int, num_ranks: int
) -> None:
    """Against the sum over tokens, divided by hand; branches go to any micro batch and rank."""
    samples, expected, mean = [], {}, 0.0
    for trace, count in enumerate(branches):
        mine = [
            build_sample(
                7 + 3 * i, seed=10 * trace + i, advantage=trace - 1.5, id=f"e{trace}/0/{i}"
            )
            for i in range(count)
        ]
        samples += mine
        # The mean over the trace's tokens, computed alone as one batch of the default aggregation.
        mean += bench.step.run([build_micro_batch([sample]) for sample in mine]).total
        for name, gradient in bench.take_gradients().items():
            expected[name] = expected.get(name, 0.0) + gradient / len(branches)
    ranks = pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    step = GradientStep(bench.policy, Dppo(learning.DppoConfig()), world, aggregation="trace_mean")
    result = step.run([m for micro_batches in ranks for m in micro_batches])
    assert result.total == pytest.approx(mean / len(branches), rel=1e-4, abs=1e-5)
    assert bench.distance(bench.take_gradients(), expected) < TOLERANCE


def unpacked(samples: list[Any]) -> list[Any]:
    return [build_micro_batch([sample]) for sample in samples]


LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    # The tiny model's probabilities are near 0.01: thresholds that some tokens pass.
    "dppo": {"threshold": 0.004},
    "ipo": {"threshold": 0.004},
    "ppo_clip": {"entropy_coefficient": 0.1},
    "dapo": {"reference_kl_coefficient": 0.1, "kl_coefficient": 0.01},
    "cispo": {"ratio_cap": 1.1},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
}
corrections = st.fixed_dictionaries(
    {
        "importance_sampling": st.sampled_from(["off", "truncated", "masked"]),
        "importance_level": st.sampled_from(["token", "sequence", "sequence_mean"]),
        "importance_cap": st.sampled_from([1.2, 2.0]),
    }
)


@pytest.mark.parametrize("name", sorted(LossConfig.registered()))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    max_tokens=st.integers(16, 60),
    is_packed=st.booleans(),
    correction=corrections,
)
def test_every_loss_gives_the_plain_loss_and_gradient_packed_or_not(
    bench: Any,
    world: Any,
    ragged_samples: Any,
    reference: Any,
    name: str,
    lengths: list[int],
    seed: int,
    max_tokens: int,
    is_packed: bool,
    correction: dict[str, Any],
) -> None:
    options = LOSS_OPTIONS[name] | correction
    samples = ragged_samples(lengths, seed=seed)
    total, gradients = reference.loss(samples, name, **options)
    step = GradientStep(bench.policy, build_loss(build_loss_config(name, **options)), world)
    packed = pack(samples, max_tokens=max_tokens, num_ranks=1)[0]
    result = step.run(packed if is_packed else unpacked(samples))
    assert result.total == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert bench.distance(bench.take_gradients(), gradients) < TOLERANCE


def test_members_are_counted_over_all_micro_batches(bench: Any) -> None:
    samples = [build_sample(6, prompt_length=2), build_sample(9, prompt_length=3, seed=1)]
    result = bench.step.run([build_micro_batch([s]) for s in samples])
    bench.take_gradients()
    assert result.members == {"rl": 4 + 6, "ce": 0, "ref_kl": 0, "ce_batch": 0, "ce_trace": 0}
    assert result.tokens == 15


def test_the_first_token_of_a_sample_never_trains(bench: Any) -> None:
    result = bench.step.run([build_micro_batch([build_sample(4, prompt_length=0)])])
    bench.take_gradients()
    assert result.members["rl"] == 3


def test_a_token_outside_the_loss_mask_never_trains(bench: Any) -> None:
    sample = build_sample(5, prompt_length=3)
    sample.arrays.loss_weights["rl"][:] = 1.0
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
    other.arrays.loss_weights["rl"][:] = 0.0
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


def test_a_loss_that_averages_is_refused(bench: Any, world: Any) -> None:
    def average(inputs: LossInputs) -> LossOutput:
        return LossOutput(-inputs.policy_logprobs.mean())

    with pytest.raises(ConfigError, match="a loss does not sum or average"):
        GradientStep(bench.policy, average, world).run([build_micro_batch()])


@pytest.mark.shows("F40")
def test_a_sampling_logprob_far_below_the_policy_gives_finite_numbers(bench: Any) -> None:
    sample = build_sample(6, prompt_length=2, advantage=-1.0)
    sample.arrays.sampling_logprobs[sample.arrays.loss_mask] = -110.0
    result = bench.step.run([build_micro_batch([sample])])
    assert all(np.isfinite(value) for value in (result.total, *result.metrics.values()))
    assert all(np.isfinite(g).all() for g in bench.take_gradients().values())

"""Cross-entropy on observation tokens: the gradient of each is exactly -alpha / N."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from msgspec import structs
from torch import Tensor

from gradus.config import learning
from gradus.trainer.distributed import World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.policy_model import TokenScores
from gradus.trainer.step import GradientStep, StepLoss
from gradus.trainer.tensors import TrainTensors
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

pytestmark = pytest.mark.torch

ALPHA = 0.1
NUM_SAMPLED = 4


def assert_exact(gradient: np.ndarray, divisor: int) -> None:
    """-alpha / N, up to the rounding of one float32 operation."""
    expected = np.full(len(gradient), -ALPHA / divisor, np.float32)
    np.testing.assert_array_max_ulp(gradient, expected, maxulp=1)


@dataclass
class GivenLogprobs:
    """A policy whose logprobs are leaves, so that their gradients can be read."""

    logprobs: list[Tensor] = field(default_factory=list)

    def __call__(self, tensors: TrainTensors) -> TokenScores:
        count = len(tensors.token_ids)
        # Unlikely tokens: any trust region would drop them against a placeholder logprob of 0.
        leaf = torch.linspace(-6.0, -2.0, count).requires_grad_()
        self.logprobs.append(leaf)
        return TokenScores(leaf, torch.zeros(count))


def build_observed(component: str, *, num_observed: int = 3, alpha: float = ALPHA) -> Sample:
    """Question, `num_observed` observation tokens, then sampled tokens."""
    prompt = 2 + num_observed
    sample = build_sample(prompt + NUM_SAMPLED, prompt_length=prompt)
    is_observed = np.zeros(len(sample), np.bool_)
    is_observed[2:prompt] = True
    sample.arrays.loss_weights[component] = np.where(is_observed, np.float32(alpha), np.float32(0))
    sample.arrays.loss_mask[is_observed] = True
    return sample


def run(world: World, *samples: Sample) -> tuple[StepLoss, list[np.ndarray]]:
    """The step's numbers, and the gradient of each micro batch's logprobs."""
    policy = GivenLogprobs()
    result = GradientStep(policy, Dppo(learning.DppoConfig()), world).run(
        [build_micro_batch([s]) for s in samples]
    )
    return result, [leaf.grad.numpy() for leaf in policy.logprobs]


def test_own_normalisation_divides_by_the_observations_alone(world: World) -> None:
    result, (gradient,) = run(world, build_observed("ce"))
    assert result.members == {"rl": NUM_SAMPLED, "ce": 3, "ref_kl": 0, "ce_batch": 0, "ce_trace": 0}
    assert_exact(gradient[2:5], 3)


def test_batch_normalisation_divides_by_the_tokens_of_rl_and_observations(world: World) -> None:
    result, (gradient,) = run(world, build_observed("ce_batch"))
    assert result.members == {"rl": NUM_SAMPLED, "ce": 0, "ref_kl": 0, "ce_batch": 3, "ce_trace": 0}
    assert_exact(gradient[2:5], 3 + NUM_SAMPLED)


def test_the_denominator_spans_all_micro_batches(world: World) -> None:
    _, (first, second) = run(
        world, build_observed("ce_batch"), build_observed("ce_batch", num_observed=5)
    )
    for gradient in (first[2:5], second[2:7]):
        assert_exact(gradient, 3 + 5 + 2 * NUM_SAMPLED)


def test_in_powers_of_two_the_gradient_has_no_rounding_at_all(world: World) -> None:
    _, (gradient,) = run(world, build_observed("ce_batch", num_observed=4, alpha=0.125))
    assert gradient[2:6].tolist() == [-0.125 / (4 + NUM_SAMPLED)] * 4


def test_rl_tokens_share_the_joint_denominator_and_keep_their_loss(world: World) -> None:
    _, (alone,) = run(world, build_sample(5 + NUM_SAMPLED, prompt_length=5))
    _, (beside,) = run(world, build_observed("ce_batch"))
    np.testing.assert_allclose(beside[5:], alone[5:] * NUM_SAMPLED / (3 + NUM_SAMPLED), rtol=1e-6)


def test_own_normalisation_leaves_the_rl_tokens_alone(world: World) -> None:
    _, (alone,) = run(world, build_sample(5 + NUM_SAMPLED, prompt_length=5))
    _, (beside,) = run(world, build_observed("ce"))
    assert beside[5:].tolist() == alone[5:].tolist()


@pytest.mark.parametrize("component", ["ce", "ce_batch"])
def test_surprise_is_recorded_without_its_weight(world: World, component: str) -> None:
    samples = [build_observed(component), build_observed(component, num_observed=5)]
    result, _ = run(world, *samples)
    surprise = [-np.linspace(-6.0, -2.0, len(s))[2 : len(s) - NUM_SAMPLED] for s in samples]
    values = np.concatenate(surprise)
    assert result.metrics[f"loss/{component}/nll/mean"] == pytest.approx(values.mean(), rel=1e-6)
    assert result.metrics[f"loss/{component}/nll/max"] == pytest.approx(values.max(), rel=1e-6)
    assert result.metrics[f"loss/{component}/tokens/sum"] == 8


def test_without_observations_there_is_no_number_about_them(world: World) -> None:
    result, _ = run(world, build_sample())
    assert not any("nll" in name for name in result.metrics)


@pytest.mark.parametrize("max_tokens", [12, 100])
def test_trace_normalisation_is_the_mean_over_traces_of_their_weighted_sums(
    world: World, max_tokens: int
) -> None:
    """Three traces, one in two branches and one without an observation, against plain sums."""
    samples = [
        structs.replace(build_observed("ce_trace", num_observed=n, alpha=alpha), id=name)
        for name, n, alpha in (("a/0/0", 3, 0.5), ("a/0/1", 2, 0.5), ("b/0/0", 4, 0.25))
    ]
    samples.append(structs.replace(build_sample(9), id="c/0/0"))
    [micro_batches] = pack(samples, max_tokens=max_tokens, num_ranks=1)
    policy = GivenLogprobs()
    result = GradientStep(policy, Dppo(learning.DppoConfig()), world).run(micro_batches)
    by_hand = 0.0
    for leaf, micro_batch in zip(policy.logprobs, micro_batches, strict=True):
        weights = micro_batch.arrays.loss_weights.get("ce_trace", np.zeros(len(leaf)))
        weights = weights.astype(np.float64)
        by_hand += float((-leaf.detach().double().numpy() * weights).sum()) / 2
        is_observed = weights > 0
        expected = (-weights / 2)[is_observed].astype(np.float32)
        np.testing.assert_array_max_ulp(leaf.grad.numpy()[is_observed], expected, maxulp=1)
    assert result.metrics["loss/ce_trace/mean"] == pytest.approx(by_hand, rel=1e-6)
    assert result.members["ce_trace"] == 3 + 2 + 4

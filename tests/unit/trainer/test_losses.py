"""What single losses do to single tokens, their options, and hostile numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import build_loss_config
from plain_losses import PlainToken, plain_loss
from torch import Tensor

from gradus.config import learning
from gradus.config.schema.learning import LossConfig
from gradus.trainer.losses import (
    MAX_LOG_RATIO,
    Cispo,
    Dapo,
    Dppo,
    Gspo,
    Ipo,
    LossInputs,
    LossOutput,
    PolicyGradient,
    PpoClip,
    build_loss,
    cross_entropy,
    reference_kl,
)

pytestmark = pytest.mark.torch


def build_inputs(
    policy: list[float],
    sampling: list[float],
    *,
    advantages: list[float] | None = None,
    reference: list[float | None] | None = None,
    mask: list[bool] | None = None,
    entropies: list[float] | None = None,
    sample_index: list[int] | None = None,
) -> LossInputs:
    count = len(policy)
    scores = reference or [None] * count
    return LossInputs(
        policy_logprobs=torch.tensor(policy, requires_grad=True),
        sampling_logprobs=torch.tensor(sampling),
        reference_logprobs=torch.tensor([0.0 if r is None else r for r in scores]),
        advantages=torch.tensor(advantages or [1.0] * count),
        entropies=torch.tensor(entropies or [0.0] * count, requires_grad=True),
        mask=torch.tensor(mask or [True] * count),
        sample_index=torch.tensor(sample_index or [0] * count),
        is_scored=torch.tensor([r is not None for r in scores]),
    )


def gradient_of(output: LossOutput, inputs: LossInputs) -> Tensor:
    (gradient,) = torch.autograd.grad(output.per_token.sum(), inputs.policy_logprobs)
    return gradient


def test_dppo_drops_tokens_that_moved_too_far_in_the_wanted_direction() -> None:
    low, high = math.log(0.1), math.log(0.5)
    inputs = build_inputs(
        [high, low, high, low], [low, high, low, high], advantages=[1.0, -1.0, -1.0, 1.0]
    )
    output = Dppo(learning.DppoConfig(kl_coefficient=0.0))(inputs)
    assert output.metrics["dropped_tokens/share"].tolist() == [1, 1, 0, 0]
    gradient = gradient_of(output, inputs)
    assert gradient[:2].tolist() == [0, 0]
    assert (gradient[2:] != 0).all()


def test_the_squared_log_ratio_stays_on_dropped_tokens() -> None:
    inputs = build_inputs([math.log(0.5)], [math.log(0.1)], advantages=[1.0])
    output = Dppo(learning.DppoConfig(kl_coefficient=1e-3))(inputs)
    assert output.per_token.item() == pytest.approx(1e-3 * math.log(5) ** 2)


EXTREME = [-1e30, -1e4, -200.0, 0.0, 1e4, math.inf, -math.inf, math.nan]


ALL_LOSSES = [
    *(build_loss(build_loss_config(name)) for name in LossConfig.registered()),
    cross_entropy,
    reference_kl,
]


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_masked_tokens_with_extreme_logprobs_give_no_nan(loss: object) -> None:
    assert callable(loss)
    count = len(EXTREME)
    inputs = build_inputs(
        [-1.0, *EXTREME],
        [-0.9, *reversed(EXTREME)],
        reference=[-0.5, *EXTREME],
        advantages=[1.0, *EXTREME],
        mask=[True] + [False] * count,
    )
    output = loss(inputs)
    assert output.per_token[1:].tolist() == [0.0] * count
    gradient = gradient_of(output, inputs)
    assert torch.isfinite(gradient).all()
    assert gradient[1:].tolist() == [0.0] * count
    assert gradient[0] != 0


@pytest.mark.shows("F40")
@pytest.mark.parametrize("loss", ALL_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("policy", "sampling"), [(-1.0, -100.0), (-100.0, -1.0), (-1.0, -1e4)])
def test_a_ratio_that_overflows_gives_finite_numbers(
    loss: object, advantage: float, policy: float, sampling: float
) -> None:
    assert callable(loss)
    inputs = build_inputs([policy], [sampling], advantages=[advantage], reference=[-50.0])
    output = loss(inputs)
    assert torch.isfinite(output.per_token).all()
    assert torch.isfinite(gradient_of(output, inputs)).all()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_importance_sampling_never_overflows(kind: str, level: str) -> None:
    loss = PpoClip(learning.PpoClipConfig(importance_sampling=kind, importance_level=level))
    inputs = build_inputs([-1.0] * 3, [-1e4] * 3, advantages=[-1.0] * 3)
    output = loss(inputs)
    expected = 0.0 if kind == "masked" else 2.0
    assert output.per_token.tolist() == pytest.approx([expected] * 3)
    assert gradient_of(output, inputs).tolist() == pytest.approx([expected] * 3)


def test_a_clamped_ratio_keeps_its_direction() -> None:
    inputs = build_inputs([-1.0], [-100.0], advantages=[-1.0])
    output = PolicyGradient(learning.PolicyGradientConfig(type="mine:Mine"))(inputs)
    assert gradient_of(output, inputs).item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)


def test_ipo_drops_whatever_the_advantage() -> None:
    low, high = math.log(0.3), math.log(0.5)
    inputs = build_inputs([high, high, low, low], [low, low, high, high], advantages=[1, -1, 1, -1])
    output = Ipo(learning.IpoConfig(kl_coefficient=0.0))(inputs)
    assert output.metrics["dropped_tokens/share"].tolist() == [1, 1, 1, 1]
    assert gradient_of(output, inputs).tolist() == [0, 0, 0, 0]


def test_ppo_clips_only_in_the_direction_that_the_advantage_wants() -> None:
    up, down = math.log(1.5), math.log(0.5)
    inputs = build_inputs([up, up, down, down], [0.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0])
    output = PpoClip(learning.PpoClipConfig())(inputs)
    assert output.per_token.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert gradient_of(output, inputs).tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_dapo_lets_rare_tokens_grow_further() -> None:
    inputs = build_inputs([math.log(1.25)], [0.0])
    assert gradient_of(PpoClip(learning.PpoClipConfig())(inputs), inputs).item() == 0
    assert gradient_of(Dapo(learning.DapoConfig())(inputs), inputs).item() == pytest.approx(-1.25)


def test_cispo_keeps_the_gradient_of_tokens_beyond_the_cap() -> None:
    inputs = build_inputs([-1.0], [-1.0 - math.log(50)])
    output = Cispo(learning.CispoConfig(ratio_cap=4.0))(inputs)
    assert output.per_token.item() == pytest.approx(4.0)
    assert gradient_of(output, inputs).item() == pytest.approx(-4.0)


def test_gspo_clips_whole_samples() -> None:
    inputs = build_inputs([0.1, 0.0, -0.1, -0.1], [0.0] * 4, sample_index=[0, 0, 1, 1])
    output = Gspo(learning.GspoConfig())(inputs)
    assert output.metrics["dropped_tokens/share"].tolist() == [1, 1, 0, 0]
    expected = [0, 0, -math.exp(-0.1), -math.exp(-0.1)]
    assert gradient_of(output, inputs).tolist() == pytest.approx(expected)


def test_gspo_has_the_gradient_of_the_sequence_objective() -> None:
    """Σ over tokens of -s·A by plain autograd, s = exp(mean log ratio), one advantage."""
    inputs = build_inputs([-1.0, -2.0, -0.5], [-1.1, -1.8, -0.6], advantages=[0.7] * 3)
    mean = (inputs.policy_logprobs - inputs.sampling_logprobs).mean()
    (expected,) = torch.autograd.grad(-3 * mean.exp() * 0.7, inputs.policy_logprobs)
    found = gradient_of(Gspo(learning.GspoConfig(clip_low=0.9, clip_high=9.0))(inputs), inputs)
    torch.testing.assert_close(found, expected)


def test_a_sequence_ratio_sees_members_only() -> None:
    inputs = build_inputs([-1.0, -9.0, -1.0], [-1.1, -1.0, -1.3], mask=[True, False, True])
    weights = Gspo(learning.GspoConfig(clip_high=9.0))(inputs).per_token
    assert weights[[0, 2]].tolist() == pytest.approx([-math.exp(0.2)] * 2)


def test_the_entropy_bonus_reaches_the_entropy() -> None:
    inputs = build_inputs([-1.0, -1.0], [-1.0, -1.0], entropies=[2.0, 3.0], mask=[True, False])
    output = PpoClip(learning.PpoClipConfig(entropy_coefficient=0.1))(inputs)
    (by_entropy,) = torch.autograd.grad(output.per_token.sum(), inputs.entropies)
    assert output.per_token.tolist() == pytest.approx([-1.2, 0.0])
    assert by_entropy.tolist() == pytest.approx([-0.1, 0.0])


def test_the_reference_pulls_a_token_of_which_it_is_certain() -> None:
    inputs = build_inputs([-1.0], [-1.0], reference=[0.0], advantages=[0.0])
    output = PpoClip(learning.PpoClipConfig(reference_kl_coefficient=1.0))(inputs)
    assert output.per_token.tolist() == pytest.approx([0.5])
    assert gradient_of(output, inputs).tolist() == pytest.approx([-1.0])


def test_the_reference_pulls_only_tokens_that_it_scored() -> None:
    inputs = build_inputs([-1.0, -1.0], [-1.0, -1.0], reference=[-3.0, None], advantages=[0.0, 0.0])
    output = PpoClip(learning.PpoClipConfig(reference_kl_coefficient=0.5))(inputs)
    assert output.per_token.tolist() == pytest.approx([1.0, 0.0])
    assert gradient_of(output, inputs).tolist() == pytest.approx([1.0, 0.0])
    assert output.metrics["reference_kl/mean"].tolist() == pytest.approx(
        [math.exp(-2.0) + 2.0 - 1.0, 0.0]
    )


def test_cross_entropy_is_the_negative_logprob() -> None:
    inputs = build_inputs([-2.0, -3.0], [0.0, 0.0], mask=[True, False])
    output = cross_entropy(inputs)
    assert output.per_token.tolist() == [2.0, 0.0]
    assert gradient_of(output, inputs).tolist() == [-1.0, 0.0]


def test_reference_kl_pulls_towards_the_reference() -> None:
    inputs = build_inputs([-2.0], [-2.0], reference=[-1.0])
    output = reference_kl(inputs)
    assert output.per_token.item() == pytest.approx(-1.0)
    assert gradient_of(output, inputs).item() == pytest.approx(-1.0)


def test_reference_kl_lets_go_of_tokens_that_became_much_rarer() -> None:
    inputs = build_inputs([math.log(0.1)], [math.log(0.5)], reference=[-0.1])
    output = reference_kl(inputs)
    assert output.per_token.item() == pytest.approx(1e-3 * math.log(5) ** 2, rel=1e-5)


@pytest.mark.parametrize("moved", [-0.3, -0.19, 0.0, 0.4], ids="moved {}".format)
def test_reference_kl_follows_its_formula_and_its_gradient(moved: float) -> None:
    """The sampler gave the token probability one half; the policy moved it."""
    lp, ls, lr = math.log(0.5 + moved), math.log(0.5), -1.5
    inputs = build_inputs([lp], [ls], reference=[lr])
    output = reference_kl(inputs)
    kept = float(moved >= -0.2)
    pull = kept * (lr - lp) * math.exp(lp - ls)
    assert output.per_token.item() == pytest.approx(-pull + 1e-3 * (lp - ls) ** 2, rel=1e-4)
    gradient = -pull + 2e-3 * (lp - ls)
    assert gradient_of(output, inputs).item() == pytest.approx(gradient, rel=1e-4)


def test_a_registered_loss_is_built_with_its_options() -> None:
    loss = build_loss(build_loss_config("gspo", clip_high=0.1, importance_cap=3))
    assert loss == Gspo(learning.GspoConfig(clip_high=0.1, importance_cap=3))


def test_a_class_of_the_users_own_module_works(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class Mine:\n    def __init__(self, *, scale): self.scale = scale\n"
    (tmp_path / "my_losses.py").write_text(source)  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = build_loss(build_loss_config("my_losses:Mine", options={"scale": 2.0}))
    assert loss.scale == 2.0  # type: ignore[attr-defined]


CORRECTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "truncated": {"importance_sampling": "truncated", "importance_cap": 1.25},
    "masked": {"importance_sampling": "masked", "importance_cap": 1.25},
}


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("name", sorted(LossConfig.registered()))
def test_with_recomputed_logprobs_a_loss_is_decoupled_ppo(name: str, correction: str) -> None:
    """w·loss(policy against proximal) in float64 with w = proximal over sampled: the pull is of
    the proximal policy, and neither pull nor entropy has the weight."""
    policy, proximal = [-1.2, -0.7, -2.5, -0.4], [-1.0, -0.9, -2.2, -0.5]
    sampled, advantages = [-1.1, -1.5, -2.25, -0.3], [1.0, -0.5, 2.0, -1.5]
    inputs = build_inputs(policy, proximal, advantages=advantages)
    drift = [new - old for new, old in zip(proximal, sampled, strict=True)]
    inputs = replace(inputs, drift=torch.tensor(drift))
    options = {"kl_coefficient": 0.5}
    output = build_loss(build_loss_config(name, **options, **CORRECTIONS[correction]))(inputs)
    tokens = [
        PlainToken(policy=p, sampling=o, advantage=a)
        for p, o, a in zip(policy, proximal, advantages, strict=True)
    ]
    # No token reaches the cap of cispo, which is of the product: the test below.
    alone = plain_loss(name, tokens, kl_coefficient=0.0)
    weights = [math.exp(it) for it in drift]
    if correction == "truncated":
        weights = [min(weight, 1.25) for weight in weights]
    if correction == "masked":
        weights = [weight if 1 / 1.25 <= weight <= 1.25 else 0.0 for weight in weights]
    assert len(set(weights)) > 1
    moved = [token.log_ratio for token in tokens]
    values = [w * v + 0.5 * m**2 for w, v, m in zip(weights, alone.values, moved, strict=True)]
    slopes = [w * s + m for w, s, m in zip(weights, alone.by_logprob, moved, strict=True)]
    assert output.per_token.tolist() == pytest.approx(values, rel=1e-5)
    assert gradient_of(output, inputs).tolist() == pytest.approx(slopes, rel=1e-5)


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_cispo_caps_what_recomputed_logprobs_weigh_by(correction: str) -> None:
    """The weight is policy over sampled, whatever lies between the two."""
    policy, proximal, sampled = [-1.0, -1.0, -1.0], [-1.1, -3.0, -1.2], [-9.0, -4.0, -1.1]
    inputs = build_inputs(policy, proximal, advantages=[1.0, 1.0, 1.0])
    drift = [new - old for new, old in zip(proximal, sampled, strict=True)]
    inputs = replace(inputs, drift=torch.tensor(drift))
    output = build_loss(build_loss_config("cispo", **CORRECTIONS[correction]))(inputs)
    slopes = gradient_of(output, inputs).abs().tolist()
    assert max(slopes) <= 5.0 * (1 + 1e-6)
    if correction == "off":
        assert slopes == pytest.approx([5.0, 5.0, math.exp(0.1)])

"""What every registered loss of the rl component promises."""

from __future__ import annotations

import pytest
import torch
from configs import build_loss_config

from gradus.config.schema.learning import LossConfig
from gradus.trainer.losses import LossInputs, build_loss

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("name", sorted(LossConfig.registered()))]


def build_inputs(count: int, *, members: int, seed: int = 0) -> LossInputs:
    torch.manual_seed(seed)
    policy = -torch.rand(count) * 3
    return LossInputs(
        policy_logprobs=policy.clone().requires_grad_(),
        sampling_logprobs=policy + torch.randn(count) * 0.2,
        reference_logprobs=-torch.rand(count) * 3,
        advantages=torch.randn(count),
        entropies=torch.rand(count),
        mask=torch.arange(count) < members,
        sample_index=torch.arange(count) // 3,
        is_scored=torch.ones(count, dtype=torch.bool),
    )


def test_a_loss_is_per_token_and_zero_outside_the_mask(name: str) -> None:
    output = build_loss(build_loss_config(name))(build_inputs(9, members=6))
    assert output.per_token.shape == (9,)
    assert output.per_token.dtype == torch.float32
    assert not output.per_token[6:].any()
    assert all(values.shape == (9,) for values in output.metrics.values())


def test_a_loss_never_normalises(name: str) -> None:
    """A token's loss does not change with the number of other members from other samples."""
    loss, inputs = build_loss(build_loss_config(name)), build_inputs(9, members=9)
    few = build_inputs(9, members=3)
    assert torch.equal(loss(inputs).per_token[:3], loss(few).per_token[:3])


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("kind", ["off", "truncated", "masked"])
def test_options_together_keep_the_promises(name: str, kind: str, level: str) -> None:
    options = {
        "importance_sampling": kind,
        "importance_level": level,
        "entropy_coefficient": 0.1,
        "reference_kl_coefficient": 0.1,
    }
    loss = build_loss(build_loss_config(name, **options))
    many, few = loss(build_inputs(9, members=9)), loss(build_inputs(9, members=3))
    assert torch.equal(many.per_token[:3], few.per_token[:3])
    assert torch.isfinite(many.per_token).all()
    assert many.metrics.keys() == few.metrics.keys()
    assert not few.per_token[3:].any()


def test_metrics_have_the_same_names_without_members(name: str) -> None:
    loss = build_loss(build_loss_config(name))
    some, none = loss(build_inputs(4, members=4)), loss(build_inputs(4, members=0))
    assert some.metrics.keys() == none.metrics.keys()
    assert not none.per_token.any()


def test_gradients_push_towards_a_positive_advantage(name: str) -> None:
    inputs = build_inputs(1, members=1)
    inputs.sampling_logprobs.copy_(inputs.policy_logprobs.detach())
    for advantage in (1.0, -1.0):
        inputs.advantages.fill_(advantage)
        per_token = build_loss(build_loss_config(name))(inputs).per_token
        (gradient,) = torch.autograd.grad(per_token.sum(), inputs.policy_logprobs)
        assert gradient.item() * advantage < 0


def test_masked_tokens_that_are_not_finite_do_no_harm(name: str) -> None:
    inputs = build_inputs(6, members=3)
    with torch.no_grad():
        for tensor in (inputs.policy_logprobs, inputs.sampling_logprobs, inputs.advantages):
            tensor[3:] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    output = build_loss(build_loss_config(name))(inputs)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), inputs.policy_logprobs)
    assert torch.isfinite(output.per_token).all()
    assert torch.isfinite(gradient).all()
    assert not gradient[3:].any()

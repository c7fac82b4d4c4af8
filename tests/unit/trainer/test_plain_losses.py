"""Every registered loss against its plain float64 second version: values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from configs import build_loss_config
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plain_losses import PlainLoss, PlainToken, plain_loss

from gradus.config.schema.learning import LossConfig
from gradus.trainer.losses import LossInputs, build_loss

pytestmark = pytest.mark.torch

RELATIVE_TOLERANCE = 5e-6
ABSOLUTE_TOLERANCE = 2e-6
"""Float32 formulas of numbers of order one, against float64."""
LEAST_MARGIN = 1e-5
"""Nearer to a threshold, float32 may decide otherwise."""


def as_inputs(samples: list[list[PlainToken]], dtype: torch.dtype) -> LossInputs:
    """The samples laid end to end; a token that is not a member stands before each."""
    tokens, mask, index = [], [], []
    for number, sample in enumerate(samples):
        tokens += [PlainToken(-3.0, 0.0, 5.0), *sample]
        mask += [False] + [True] * len(sample)
        index += [number] * (len(sample) + 1)

    def column(name: str, *, requires_grad: bool = False) -> torch.Tensor:
        values = [getattr(token, name) for token in tokens]
        return torch.tensor(values, dtype=dtype, requires_grad=requires_grad)

    return LossInputs(
        policy_logprobs=column("policy", requires_grad=True),
        sampling_logprobs=column("sampling"),
        reference_logprobs=column("reference").nan_to_num(0.0),
        advantages=column("advantage"),
        entropies=column("entropy", requires_grad=True),
        mask=torch.tensor(mask),
        sample_index=torch.tensor(index),
        is_scored=torch.tensor([token.is_scored for token in tokens]),
    )


def compare(
    name: str, options: dict[str, Any], samples: list[list[PlainToken]], dtype: torch.dtype
) -> None:
    plain = [plain_loss(name, sample, **options) for sample in samples]
    assume(min(part.margin for part in plain) > LEAST_MARGIN)
    inputs = as_inputs(samples, dtype)
    output = build_loss(build_loss_config(name, **options))(inputs)
    by_logprob, by_entropy = torch.autograd.grad(
        output.per_token.sum(),
        (inputs.policy_logprobs, inputs.entropies),
        allow_unused=True,
        materialize_grads=True,
    )
    found = {
        "values": output.per_token.detach(),
        "by_logprob": by_logprob,
        "by_entropy": by_entropy,
    }
    is_exact = dtype == torch.float64
    for field, tensor in found.items():
        np.testing.assert_allclose(
            tensor[inputs.mask].numpy(),
            joined(plain, field),
            rtol=1e-12 if is_exact else RELATIVE_TOLERANCE,
            atol=1e-12 if is_exact else ABSOLUTE_TOLERANCE,
            err_msg=f"{name} {field}",
        )
        assert not tensor[~inputs.mask].any()


def joined(plain: list[PlainLoss], field: str) -> list[float]:
    return [value for part in plain for value in getattr(part, field)]


single = st.floats(-3, 3, width=32)
tokens = st.builds(
    lambda sampling, shift, advantage, reference, entropy: PlainToken(
        policy=float(np.float32(sampling + shift)),
        sampling=sampling,
        advantage=advantage,
        reference=reference,
        entropy=entropy,
    ),
    sampling=st.floats(-7, -0.0625, width=32),
    shift=st.one_of(st.floats(-0.125, 0.125, width=32), st.floats(-2, 2, width=32), st.just(0.0)),
    advantage=single,
    reference=st.sampled_from([float("nan"), 0.0, -0.5, -2.25]),
    entropy=st.floats(0, 4, width=32),
)
batches = st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=4)
pulls = st.fixed_dictionaries(
    {},
    optional={
        "kl_coefficient": st.sampled_from([0.0, 0.25]),
        "entropy_coefficient": st.sampled_from([0.0, 0.125]),
        "reference_kl_coefficient": st.sampled_from([0.0, 0.5]),
        "reference_kl_estimator": st.sampled_from(["k2", "k3"]),
    },
)
SCORED = PlainToken(-0.75, -0.5, 0.5, reference=-1.5, entropy=1.0)
PULLS = {"kl_coefficient": 0.25, "entropy_coefficient": 0.125, "reference_kl_coefficient": 0.5}
"""Every pull at once, which few random options have."""
corrections = st.fixed_dictionaries(
    {
        "importance_sampling": st.sampled_from(["truncated", "masked"]),
        "importance_level": st.sampled_from(["token", "sequence", "sequence_mean"]),
        "importance_cap": st.sampled_from([1.0625, 1.5, 4.0]),
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", sorted(LossConfig.registered()))
@settings(max_examples=30, deadline=None)
@given(samples=batches, options=pulls)
@example(samples=[[SCORED]], options=PULLS | {"reference_kl_estimator": "k2"})
@example(samples=[[SCORED]], options=PULLS | {"reference_kl_estimator": "k3"})
def test_a_loss_follows_its_formula_and_its_gradient(
    name: str, dtype: torch.dtype, samples: list[list[PlainToken]], options: dict[str, Any]
) -> None:
    compare(name, options, samples, dtype)


@pytest.mark.parametrize("name", sorted(LossConfig.registered()))
@settings(max_examples=40, deadline=None)
@given(samples=batches, options=corrections)
def test_importance_sampling_follows_its_formula(
    name: str, samples: list[list[PlainToken]], options: dict[str, Any]
) -> None:
    compare(name, options, samples, torch.float64)


def test_the_plain_version_says_how_near_a_decision_was() -> None:
    token = PlainToken(policy=float(np.log(0.5)), sampling=float(np.log(0.2)))
    assert plain_loss("dppo", [token]).margin == pytest.approx(0.1)
    assert plain_loss("ipo", [token]).margin == pytest.approx(0.2)
    assert plain_loss("cispo", [token]).margin == np.inf


def test_the_plain_version_has_an_entry_for_every_registered_loss() -> None:
    for name in LossConfig.registered():
        result = plain_loss(name, [PlainToken(-1.0, -1.0), PlainToken(-2.0, -2.0)])
        assert len(result.values) == len(result.by_logprob) == len(result.by_entropy) == 2

"""The two fixed components beside rl: cross-entropy, and the policy gradient to a reference."""

from __future__ import annotations

import torch

from gradus.trainer.losses.base import LossInputs, LossOutput
from gradus.trainer.losses.rule import carry_gradient, clamped_exp

_REF_KL_THRESHOLD = 0.2
_REF_KL_COEFFICIENT = 1e-3


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """-policy logprob on members; the loss weight is applied in step.py."""
    return LossOutput(torch.where(inputs.mask, -inputs.policy_logprobs, 0.0))


def reference_kl(inputs: LossInputs) -> LossOutput:
    """-1[Δ ≥ -0.2]·sg(reference - policy logprob)·ratio + 1e-3·(ln ratio)² on members."""
    mask = inputs.mask
    log_ratio = torch.where(mask, inputs.policy_logprobs - inputs.sampling_logprobs, 0.0)
    with torch.no_grad():
        shift = inputs.policy_logprobs.exp() - inputs.sampling_logprobs.exp()
        is_kept = mask & (shift >= -_REF_KL_THRESHOLD)
        pull = inputs.reference_logprobs - inputs.policy_logprobs
    kept = torch.where(is_kept, log_ratio, 0.0)
    ratio = carry_gradient(clamped_exp(kept), kept)
    gain = torch.where(is_kept, pull * ratio, 0.0)
    return LossOutput(-gain + _REF_KL_COEFFICIENT * log_ratio.square())

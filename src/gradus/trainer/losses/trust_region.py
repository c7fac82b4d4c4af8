"""Losses that drop a token when its probability moved too far: dppo and ipo.

Δ = exp(policy logprob) - exp(sampling logprob). The weight is the ratio, never clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradus.trainer.losses.base import LossInputs
from gradus.trainer.losses.rule import Limit, PolicyGradient


@dataclass(frozen=True, kw_only=True)
class Dppo(PolicyGradient):
    """Drops where Δ passed the threshold in the direction that the advantage wants.

    Binary total-variation trust region of arXiv 2602.04879 with the squared log-ratio term of
    arXiv 2602.02276: dropped when A > 0 and Δ > threshold, or A ≤ 0 and Δ < -threshold.
    """

    threshold: float = 0.2
    kl_coefficient: float = 1e-3

    def limit(self, inputs: LossInputs) -> Limit:
        shift = _shift(inputs)
        is_too_far = torch.where(
            inputs.advantages > 0, shift > self.threshold, shift < -self.threshold
        )
        return Limit(is_too_far, 0.0)


@dataclass(frozen=True, kw_only=True)
class Ipo(PolicyGradient):
    """Drops where |Δ| passed the threshold, whatever the advantage."""

    threshold: float = 0.1
    kl_coefficient: float = 1e-3

    def limit(self, inputs: LossInputs) -> Limit:
        return Limit(_shift(inputs).abs() > self.threshold, 0.0)


def _shift(inputs: LossInputs) -> Tensor:
    return inputs.policy_logprobs.exp() - inputs.sampling_logprobs.exp()

"""Losses that clip a ratio: ppo_clip, dapo, gspo and cispo."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradus.trainer.losses.base import LossInputs
from gradus.trainer.losses.rule import Limit, PolicyGradient, clamped_exp


@dataclass(frozen=True, kw_only=True)
class PpoClip(PolicyGradient):
    """-min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A) of arXiv 1707.06347."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def limit(self, inputs: LossInputs) -> Limit:
        advantages = inputs.advantages
        ratio = clamped_exp(self.log_ratio(inputs))
        lowest, highest = 1.0 - self.clip_low, 1.0 + self.clip_high
        is_above = (advantages > 0) & (ratio > highest)
        is_below = (advantages < 0) & (ratio < lowest)
        return Limit(is_above | is_below, advantages * ratio.clamp(lowest, highest))


@dataclass(frozen=True, kw_only=True)
class Dapo(PpoClip):
    """ppo_clip with a wider upper bound, which lets rare tokens grow (arXiv 2503.14476)."""

    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True)
class Gspo(PpoClip):
    """ppo_clip on the ratio of the sequence, the geometric mean over its members.

    The token form of arXiv 2507.18071: the value is the sequence's, the gradient of a token is
    ratio·A·∇lp with the token's own advantage.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sample_means(inputs.policy_logprobs - inputs.sampling_logprobs)


@dataclass(frozen=True, kw_only=True)
class Cispo(PolicyGradient):
    """-sg(min(ratio, ratio_cap))·A·lp of arXiv 2506.13585: every token keeps a gradient."""

    ratio_cap: float = 5.0

    def weights(self, log_weights: Tensor) -> Tensor:
        return clamped_exp(log_weights.clamp(max=math.log(self.ratio_cap)))

    def gain(self, policy_logprobs: Tensor, weights: Tensor) -> Tensor:
        return weights * policy_logprobs

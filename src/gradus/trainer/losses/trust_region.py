"""DPPO: a policy gradient that drops tokens whose probability moved too far.

Binary total-variation trust region of arXiv 2602.04879 with the squared log-ratio term of
arXiv 2602.02276. With Δ = exp(policy logprob) - exp(sampling logprob) and
ratio = exp(policy logprob - sampling logprob), a token is dropped from the policy gradient when
its advantage A > 0 and Δ > threshold, or A ≤ 0 and Δ < -threshold.
"""

from __future__ import annotations

import torch

from gradus.errors import ConfigError
from gradus.trainer.losses.base import LossInputs, LossOutput


class Dppo:
    """-keep·A·ratio + kl_coefficient·(ln ratio)² per token; the ratio carries gradient, unclamped.

    >>> Dppo(threshold=0.2)(inputs).per_token.shape  # doctest: +SKIP
    torch.Size([T])
    """

    def __init__(self, *, threshold: float = 0.2, kl_coefficient: float = 1e-3) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(f"dppo: threshold = {threshold} must lie in (0, 1]")
        if kl_coefficient < 0:
            raise ConfigError(f"dppo: kl_coefficient = {kl_coefficient} must not be negative")
        self._threshold = threshold
        self._kl_coefficient = kl_coefficient

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of each token; the squared log ratio stays on dropped tokens."""
        mask, advantages = inputs.mask, inputs.advantages
        # Neutral values go in before exp, so that no gradient passes through an overflow.
        log_ratio = torch.where(mask, inputs.policy_logprobs - inputs.sampling_logprobs, 0.0)
        with torch.no_grad():
            shift = inputs.policy_logprobs.exp() - inputs.sampling_logprobs.exp()
            too_far = torch.where(advantages > 0, shift > self._threshold, shift < -self._threshold)
            is_dropped = mask & too_far
        ratio = torch.where(is_dropped, 0.0, log_ratio).exp()
        gain = torch.where(mask & ~is_dropped, advantages * ratio, 0.0)
        per_token = -gain + self._kl_coefficient * log_ratio.square()
        return LossOutput(per_token, {"dropped_tokens/share": is_dropped.float()})

"""The one rule that every registered loss specialises: a policy gradient with a limit.

    loss = -A·gain - c_H·H + c_kl·(ln ratio)² + c_ref·½(lp - lr)²        nats per token, on members

with lp, ls, lr the policy, sampling and reference logprobs, ratio = exp(lp - ls), A the advantage
and H the entropy. The gain of a token has the gradient weight·∇lp; a token that the limit drops
has none. The three other terms stay on dropped tokens. A loss says what the weight is (the ratio,
unless it says otherwise) and where the limit lies; everything else is shared.

Every ratio is kept as its logarithm and clamped to 20 before `exp`, so that 5e8 is the largest
weight: float32 overflows at e^88, its squared gradient norm at e^44. Shapes: T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradus.trainer.losses.base import LossInputs, LossOutput

MAX_LOG_RATIO = 20.0
"""Nats; a larger log ratio counts as this one in a weight."""


@dataclass(frozen=True)
class Limit:
    """Which tokens a loss lets go of; [T], without gradient."""

    is_dropped: Tensor
    """Bool: the token adds no gradient."""
    constants: Tensor | float
    """A·gain of dropped tokens; it moves the reported loss only."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """A loss of the rl component; the fields are its options, `docs/algorithms.md` explains them.

    >>> Dppo(threshold=0.1, entropy_coefficient=0.01)(inputs).per_token.shape  # doctest: +SKIP
    torch.Size([T])
    """

    kl_coefficient: float = 0.0
    """Factor of (ln ratio)², the pull towards the policy that sampled."""
    entropy_coefficient: float = 0.0
    """Factor of the entropy bonus."""
    reference_kl_coefficient: float = 0.0
    """Factor of the pull towards the reference model, on tokens that it scored."""
    importance_sampling: str = "off"
    """`truncated`: the weight becomes min(r, cap). `masked`: tokens with r outside [1/cap, cap] are
    dropped."""
    importance_level: str = "token"
    """What r is: the `token`'s ratio, the product over its `sequence`, or the geometric mean
    (`sequence_mean`)."""
    importance_cap: float = 2.0

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether samples without a reference model's logprobs are a mistake."""
        return self.reference_kl_coefficient > 0

    def limit(self, inputs: LossInputs) -> Limit:
        """Which tokens are dropped; by itself the rule drops none."""
        return Limit(torch.zeros_like(inputs.mask), 0.0)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Logarithm of the ratio that the loss limits and weighs by; [T], not yet clamped."""
        return inputs.policy_logprobs - inputs.sampling_logprobs

    def gain(self, policy_logprobs: Tensor, weights: Tensor) -> Tensor:
        """[T] with the gradient weights·∇lp; its value is the weight."""
        return carry_gradient(weights, policy_logprobs)

    def weights(self, log_weights: Tensor) -> Tensor:
        """[T] factors of the gradient."""
        return clamped_exp(log_weights)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of each token; members must be finite, other tokens may hold anything."""
        members = members_only(inputs)
        metrics: dict[str, Tensor] = {}
        with torch.no_grad():
            limit = self.limit(members)
            log_weights, is_outside = self._correct(members)
            is_outside = is_outside & members.mask
            is_masked = is_outside & (self.importance_sampling == "masked")
            is_dropped = limit.is_dropped & members.mask
            constants = torch.where(is_dropped & ~is_masked, limit.constants, 0.0)
        metrics["dropped_tokens/share"] = is_dropped.float()
        if self.importance_sampling != "off":
            metrics["outside_cap_tokens/share"] = is_outside.float()
        gain = self.gain(members.policy_logprobs, self.weights(log_weights))
        per_token = -torch.where(is_dropped | is_masked, constants, members.advantages * gain)
        return LossOutput(self._add_pulls(per_token, members, metrics), metrics)

    def _correct(self, members: LossInputs) -> tuple[Tensor, Tensor]:
        """Log weights after truncation, and the tokens whose r lies beyond the cap."""
        log_ratio = self.log_ratio(members)
        if self.importance_sampling == "off":
            return log_ratio, torch.zeros_like(members.mask)
        log_r, log_cap = self._importance(members), math.log(self.importance_cap)
        if self.importance_sampling == "truncated":
            return log_r.clamp(max=log_cap), log_r > log_cap
        return log_ratio, log_r.abs() > log_cap

    def _importance(self, members: LossInputs) -> Tensor:
        """Logarithm of r, [T]."""
        log_r = members.policy_logprobs - members.sampling_logprobs
        if self.importance_level == "sequence":
            return members.sample_sums(log_r)
        if self.importance_level == "sequence_mean":
            return members.sample_means(log_r)
        return log_r

    def _add_pulls(
        self, per_token: Tensor, members: LossInputs, metrics: dict[str, Tensor]
    ) -> Tensor:
        """The terms that stay on dropped tokens."""
        if self.kl_coefficient:
            log_ratio = members.policy_logprobs - members.sampling_logprobs
            per_token = per_token + self.kl_coefficient * log_ratio.square()
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * members.entropies
        if self.reference_kl_coefficient:
            # The estimator is the one whose gradient is that of KL(policy | reference) where the
            # policy itself sampled, without a ratio to overflow.
            distance = members.policy_logprobs - members.reference_logprobs
            reference_kl = torch.where(members.is_scored, 0.5 * distance.square(), 0.0)
            metrics["reference_kl/mean"] = reference_kl.detach()
            per_token = per_token + self.reference_kl_coefficient * reference_kl
        return per_token


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) without overflow, as a constant."""
    return log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()


def carry_gradient(values: Tensor, log_of_values: Tensor) -> Tensor:
    """The constants `values`, with the gradient values·∇log_of_values."""
    return values * (log_of_values - log_of_values.detach()).exp()


def members_only(inputs: LossInputs) -> LossInputs:
    """The inputs with 0 on every token outside the mask, before anything is computed from them:
    a NaN there would pass any later `torch.where` on the way back."""

    def kept(values: Tensor) -> Tensor:
        return torch.where(inputs.mask, values, 0.0)

    return replace(
        inputs,
        policy_logprobs=kept(inputs.policy_logprobs),
        sampling_logprobs=kept(inputs.sampling_logprobs),
        reference_logprobs=kept(inputs.reference_logprobs),
        is_scored=inputs.is_scored & inputs.mask,
        advantages=kept(inputs.advantages),
        entropies=kept(inputs.entropies),
    )

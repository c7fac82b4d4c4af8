"""A loss turns logprobs and advantages into nats per token; it never divides by a count.

From top to bottom: what a loss sees and gives, the one rule of the rl component, the six registered
losses that specialise it, the two components beside rl, and the registry. Shapes: T tokens of one
micro batch. Next page: `../inference/admin.py`, which applies the version that they made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from gradus.config import learning
from gradus.errors import ConfigError
from gradus.gate import PluginFailed, guarded, is_ours, plugin_name
from gradus.plugins import building, find_plugin
from gradus.wire.tokens import LOSS_NAMES


@dataclass(frozen=True)
class LossInputs:
    """Holds what a loss may see of one micro batch; all tensors are [T] on the model's device."""

    policy_logprobs: Tensor
    """Float32, carries gradient. -ln V on tokens that take part in no component."""
    sampling_logprobs: Tensor
    """Float32; 0 on tokens that were not sampled."""
    reference_logprobs: Tensor
    """Float32; 0 where no reference model scored, see `is_scored`."""
    advantages: Tensor
    """Float32."""
    entropies: Tensor
    """Float32, carries gradient; 0 on tokens that take part in no component."""
    mask: Tensor
    """Bool: members of the component. Other tokens may hold anything; use `torch.where`."""
    sample_index: Tensor
    """Int64: which sample of the micro batch the token belongs to, from 0."""
    is_scored: Tensor
    """Bool: tokens that a reference model scored; 0 is a logprob like any other there."""
    drift: Tensor | None = None
    """Float32, with `trainer.recompute_logprobs`: `sampling_logprobs` are then those of the trainer
    before the first update of the batch, and this is by how much they exceed those that the tokens
    were sampled with. None otherwise."""

    def sample_sums(self, values: Tensor) -> Tensor:
        """[T]: each token gets the sum of `values` over the members of its own sample.

        A sample lies in one micro batch as a whole, so this is independent of packing; the sum
        runs in float64, in the order of the tokens. Carries gradient.
        """
        kept = torch.where(self.mask, values, 0.0).double()
        sums = torch.zeros_like(kept).index_add(0, self.sample_index, kept)
        return sums.index_select(0, self.sample_index).to(values.dtype)

    def sample_means(self, values: Tensor) -> Tensor:
        """[T]: like `sample_sums`, divided by the number of members of the sample."""
        counts = self.sample_sums(torch.ones_like(values))
        return self.sample_sums(values) / counts.clamp(min=1.0)


@dataclass(frozen=True)
class LossOutput:
    """Holds what a loss returns; everything is [T]."""

    per_token: Tensor
    """Nats; 0 outside the mask. step.py multiplies by loss weights and divides by the batch."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Per-token numbers, recorded as `loss/<name>`: averaged over the members of the batch, or
    their largest (`.../max`) or sum (`.../sum`). The names must be the same in every call."""


class TokenLoss(Protocol):
    """The loss of the rl component. Built once with the options of the config as keywords."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Nats per token; must be finite and free of NaN gradients outside the mask."""


# The rule: a policy gradient with a limit.

MAX_LOG_RATIO = 20.0
"""Nats; a larger log ratio counts as this one in a weight."""


@dataclass(frozen=True)
class Limit:
    """Which tokens a loss drops; [T], without gradient."""

    is_dropped: Tensor
    """Bool: the token adds no gradient."""
    constants: Tensor | float
    """A·gain of dropped tokens; it moves the reported loss only."""


@dataclass(frozen=True)
class PolicyGradient:
    """A loss of the rl component; `docs/algorithms.md` explains its options.

    >>> Dppo(learning.DppoConfig(threshold=0.1))(inputs).per_token.shape  # doctest: +SKIP
    torch.Size([T])
    """

    config: learning.PolicyGradientConfig

    @property
    def needs_reference_logprobs(self) -> bool:
        """True if samples without a reference model's logprobs are a mistake."""
        return self.config.pulls_to_reference

    def limit(self, inputs: LossInputs) -> Limit:
        """Which tokens are dropped; by itself the rule drops none."""
        return Limit(torch.zeros_like(inputs.mask), 0.0)

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Logarithm of the ratio that the loss limits and weighs by; [T], not yet clamped."""
        return inputs.policy_logprobs - inputs.sampling_logprobs

    def gain(self, policy_logprobs: Tensor, weights: Tensor) -> Tensor:
        """[T] with the gradient weights·∇lp; its value is the weight."""
        return carry_gradient(weights, policy_logprobs)

    def weights(self, log_weights: Tensor, log_drift: Tensor | float) -> Tensor:  # noqa: ARG002
        """[T] factors of the gradient, before e^log_drift multiplies them."""
        return clamped_exp(log_weights)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of each token; members must be finite, other tokens may hold anything."""
        config, members = self.config, members_only(inputs)
        metrics: dict[str, Tensor] = {}
        with torch.no_grad():
            limit = self.limit(members)
            log_weights, is_outside = self._correct(members)
            is_outside = is_outside & members.mask
            is_masked = is_outside & (config.importance_sampling == "masked")
            is_dropped = limit.is_dropped & members.mask
            constants = torch.where(is_dropped & ~is_masked, limit.constants, 0.0)
        metrics["dropped_tokens/share"] = is_dropped.float()
        if config.importance_sampling != "off":
            metrics["outside_cap_tokens/share"] = is_outside.float()
        log_drift = self._log_drift(members)
        weights = self.weights(log_weights, 0.0 if log_drift is None else log_drift)
        gain = self.gain(members.policy_logprobs, weights)
        per_token = -torch.where(is_dropped | is_masked, constants, members.advantages * gain)
        if log_drift is not None:
            per_token = per_token * clamped_exp(log_drift)
        return LossOutput(self._add_pulls(per_token, members, metrics), metrics)

    def _log_drift(self, members: LossInputs) -> Tensor | None:
        """[T] log of the weight of decoupled PPO, truncated where that is asked for."""
        config = self.config
        if members.drift is None or config.importance_sampling != "truncated":
            return members.drift
        log_r = log_importance(members, config.importance_level)
        return log_r.clamp(max=math.log(config.importance_cap))

    def _correct(self, members: LossInputs) -> tuple[Tensor, Tensor]:
        """Log weights after truncation, and the tokens whose r lies beyond the cap."""
        config, log_ratio = self.config, self.log_ratio(members)
        if config.importance_sampling == "off":
            return log_ratio, torch.zeros_like(members.mask)
        log_r = log_importance(members, config.importance_level)
        log_cap = math.log(config.importance_cap)
        if config.importance_sampling == "truncated" and members.drift is not None:
            return log_ratio, log_r > log_cap
        if config.importance_sampling == "truncated":
            return log_r.clamp(max=log_cap), log_r > log_cap
        return log_ratio, log_r.abs() > log_cap

    def _add_pulls(
        self, per_token: Tensor, members: LossInputs, metrics: dict[str, Tensor]
    ) -> Tensor:
        """The terms that stay on dropped tokens."""
        config = self.config
        if config.kl_coefficient:
            log_ratio = members.policy_logprobs - members.sampling_logprobs
            per_token = per_token + config.kl_coefficient * log_ratio.square()
        if config.entropy_coefficient:
            per_token = per_token - config.entropy_coefficient * members.entropies
        if config.reference_kl_coefficient:
            distance = torch.where(
                members.is_scored, members.policy_logprobs - members.reference_logprobs, 0.0
            )
            # k3 also estimates KL(policy | reference) itself, whatever the pull.
            ratio = clamped_exp(-distance)
            metrics["reference_kl/mean"] = ratio - 1.0 + distance.detach()
            if config.reference_kl_estimator == "k3":
                pull = carry_gradient(ratio, -distance) - 1.0 + distance
            else:
                # Its gradient is that of KL(policy | reference) where the policy itself sampled,
                # without a ratio to overflow.
                pull = 0.5 * distance.square()
            per_token = per_token + config.reference_kl_coefficient * pull
        return per_token


def log_importance(members: LossInputs, level: str) -> Tensor:
    """Logarithm [T] of r: of the policy over the one that sampled; with `drift`, of the one before
    the first update over that one, which is the weight of decoupled PPO (arXiv 2110.00641)."""
    log_r = members.drift
    if log_r is None:
        log_r = members.policy_logprobs - members.sampling_logprobs
    if level == "sequence":
        return members.sample_sums(log_r)
    if level == "sequence_mean":
        return members.sample_means(log_r)
    return log_r


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) without overflow, as a constant."""
    return log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()


def probability_shift(inputs: LossInputs) -> Tensor:
    """[T] Δ: by how much the probability of the token has grown since it was sampled."""
    return inputs.policy_logprobs.exp() - inputs.sampling_logprobs.exp()


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
        drift=None if inputs.drift is None else kept(inputs.drift),
    )


# Four losses that clip a ratio.


@dataclass(frozen=True)
class PpoClip(PolicyGradient):
    """-min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A) of arXiv 1707.06347."""

    config: learning.ClipConfig

    def limit(self, inputs: LossInputs) -> Limit:
        advantages = inputs.advantages
        ratio = clamped_exp(self.log_ratio(inputs))
        lowest, highest = 1.0 - self.config.clip_low, 1.0 + self.config.clip_high
        is_above = (advantages > 0) & (ratio > highest)
        is_below = (advantages < 0) & (ratio < lowest)
        return Limit(is_above | is_below, advantages * ratio.clamp(lowest, highest))


@dataclass(frozen=True)
class Dapo(PpoClip):
    """ppo_clip with a wider upper bound, which lets rare tokens grow (arXiv 2503.14476)."""

    config: learning.DapoConfig


@dataclass(frozen=True)
class Gspo(PpoClip):
    """ppo_clip on the ratio of the sequence, the geometric mean over its members.

    The token form of arXiv 2507.18071: the value is the sequence's, the gradient of a token is
    ratio·A·∇lp with the token's own advantage.
    """

    config: learning.GspoConfig

    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.sample_means(inputs.policy_logprobs - inputs.sampling_logprobs)


@dataclass(frozen=True)
class Cispo(PolicyGradient):
    """-sg(min(ratio, ratio_cap))·A·lp of arXiv 2506.13585: every token keeps a gradient.

    The paper's ratio is over the policy that sampled, so the cap holds for the product with the
    weight of decoupled PPO too.
    """

    config: learning.CispoConfig

    def weights(self, log_weights: Tensor, log_drift: Tensor | float) -> Tensor:
        return clamped_exp(log_weights.clamp(max=math.log(self.config.ratio_cap) - log_drift))

    def gain(self, policy_logprobs: Tensor, weights: Tensor) -> Tensor:
        return weights * policy_logprobs


# Two losses that drop a token whose probability moved too far.


@dataclass(frozen=True)
class Dppo(PolicyGradient):
    """Drops where Δ passed the threshold in the direction that the advantage wants.

    Binary total-variation trust region of arXiv 2602.04879 with the squared log-ratio term of
    arXiv 2602.02276: dropped when A > 0 and Δ > threshold, or A ≤ 0 and Δ < -threshold.
    """

    config: learning.DppoConfig

    def limit(self, inputs: LossInputs) -> Limit:
        shift, threshold = probability_shift(inputs), self.config.threshold
        is_too_far = torch.where(inputs.advantages > 0, shift > threshold, shift < -threshold)
        return Limit(is_too_far, 0.0)


@dataclass(frozen=True)
class Ipo(PolicyGradient):
    """Drops where |Δ| passed the threshold, whatever the advantage."""

    config: learning.IpoConfig

    def limit(self, inputs: LossInputs) -> Limit:
        return Limit(probability_shift(inputs).abs() > self.config.threshold, 0.0)


# The two components beside rl, without options: cross-entropy, and the pull towards a reference.

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
        is_kept = mask & (probability_shift(inputs) >= -_REF_KL_THRESHOLD)
        pull = inputs.reference_logprobs - inputs.policy_logprobs
    kept = torch.where(is_kept, log_ratio, 0.0)
    ratio = carry_gradient(clamped_exp(kept), kept)
    gain = torch.where(is_kept, pull * ratio, 0.0)
    return LossOutput(-gain + _REF_KL_COEFFICIENT * log_ratio.square())


def needs_reference(loss: TokenLoss) -> bool:
    return bool(getattr(loss, "needs_reference_logprobs", False))


_OWN_METRICS = frozenset(
    (*LOSS_NAMES, "total", "entropy", "mismatch_kl", "ratio", "ln_ratio", "engine_kl", "stale_kl")
)
"""First parts of the names that the trainer gives its own numbers."""


class _GuardedLoss:
    """A loss of the user behind the gate: it gets copies, and what it gives is checked."""

    def __init__(self, loss: TokenLoss) -> None:
        self._loss = loss
        self.name = plugin_name("loss", loss)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """ConfigError, naming its class, where it raises or returns no loss per token."""
        given = {entry.name: getattr(inputs, entry.name) for entry in fields(inputs)}
        copies = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        try:
            with guarded(lambda: self.name):
                output = self._loss(LossInputs(**copies))
                self._check(output, inputs.mask)
        except PluginFailed as failed:
            if isinstance(failed.cause, torch.OutOfMemoryError):
                raise failed.cause from failed
            raise ConfigError(f"trainer.loss: {failed}") from failed
        return output

    def _check(self, output: LossOutput, mask: Tensor) -> None:
        if not isinstance(output, LossOutput):
            raise ConfigError(f"{self.name} returns a {type(output).__name__}, no LossOutput")
        for name, values in {"per_token": output.per_token, **output.metrics}.items():
            if not isinstance(name, str) or name.split("/")[0] in _OWN_METRICS:
                raise ConfigError(
                    f"{self.name}: a metric is called {name!r}, which is the trainer's own or no "
                    "name; choose another, e.g. 'dropped_tokens/share'"
                )
            if not isinstance(values, Tensor) or values.shape != mask.shape:
                found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ConfigError(
                    f"{self.name}: {name} has shape {found}, expected one number for each of "
                    f"{len(mask)} tokens; a loss does not sum or average"
                )
            if values.device != mask.device or values.is_complex():
                raise ConfigError(
                    f"{self.name}: {name} is {values.dtype} on {values.device}; give real numbers "
                    f"on {mask.device}"
                )


def guarded_loss(loss: TokenLoss) -> TokenLoss:
    return loss if is_ours(loss) else _GuardedLoss(loss)


def refuse_not_finite(loss: object, tokens: float) -> None:
    """ConfigError when a plug-in gave no finite number for so many tokens that have a logprob.

    Those of gradus are right: what overflows there is a batch's, whose step is skipped.
    """
    if tokens and isinstance(loss, _GuardedLoss):
        raise ConfigError(
            f"trainer.loss: {loss.name} gives numbers that are not finite to {tokens:g} tokens of "
            "a batch whose logprobs are; look for a logarithm, a division or an exp without a bound"
        )


def build_loss(config: learning.LossConfig) -> TokenLoss:
    """The loss that the config names; ConfigError for options that its class does not take."""
    kind = find_plugin("loss", config.target)
    with building(f"loss {config.type!r}", config.arguments()):
        return cast("TokenLoss", kind(**config.arguments_for(kind)))

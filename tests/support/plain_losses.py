"""Every registered loss written down a second time: float64, one token after the other, derivatives
by hand. Slow and plain on purpose; tests hold the real losses against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlainToken:
    """One member of a sample; logprobs and entropy in nats."""

    policy: float
    sampling: float
    advantage: float = 1.0
    reference: float = math.nan
    """NaN where no reference model scored."""
    entropy: float = 0.0

    @property
    def is_scored(self) -> bool:
        """Whether a reference model scored it."""
        return not math.isnan(self.reference)

    @property
    def log_ratio(self) -> float:
        return self.policy - self.sampling


@dataclass
class PlainLoss:
    """The loss of each token and its derivatives by policy logprob and by entropy."""

    values: list[float] = field(default_factory=list)
    by_logprob: list[float] = field(default_factory=list)
    by_entropy: list[float] = field(default_factory=list)
    margin: float = math.inf
    """How near any decision came to its edge; float32 may decide otherwise below about 1e-5."""

    def is_beyond(self, value: float, edge: float) -> bool:
        """value > edge, remembering how near it was."""
        self.margin = min(self.margin, abs(value - edge))
        return value > edge


Gain = tuple[float, float]
"""A·gain of a token, and its derivative by the policy logprob."""


def plain_loss(name: str, sample: Sequence[PlainToken], **options: Any) -> PlainLoss:
    """The registered loss `name` on the members of one sample.

    >>> plain_loss("dppo", [PlainToken(policy=-1.0, sampling=-1.0)]).values
    [-1.0]
    """
    chosen = {**_COMMON, **_OWN[name], **options}
    result = PlainLoss()
    for token in sample:
        own = _mean_log_ratio(sample) if name == "gspo" else token.log_ratio
        weight, is_masked = _importance(result, token, own, sample, chosen)
        gain, slope = _gain(name, result, token, own, weight, chosen)
        if is_masked:
            gain, slope = 0.0, 0.0
        value = -gain + chosen["kl_coefficient"] * token.log_ratio**2
        slope = -slope + 2 * chosen["kl_coefficient"] * token.log_ratio
        if token.is_scored:
            distance = token.policy - token.reference
            pull, pull_slope = distance**2 / 2, distance
            if chosen["reference_kl_estimator"] == "k3":
                pull = math.exp(-distance) + distance - 1
                pull_slope = 1 - math.exp(-distance)
            value += chosen["reference_kl_coefficient"] * pull
            slope += chosen["reference_kl_coefficient"] * pull_slope
        result.values.append(value - chosen["entropy_coefficient"] * token.entropy)
        result.by_logprob.append(slope)
        result.by_entropy.append(-chosen["entropy_coefficient"])
    return result


def _importance(
    result: PlainLoss,
    token: PlainToken,
    own: float,
    sample: Sequence[PlainToken],
    options: dict[str, Any],
) -> tuple[float, bool]:
    """The weight of the token, and whether the option masks it; `own` is the loss's log ratio."""
    kind, cap = options["importance_sampling"], options["importance_cap"]
    if kind == "off":
        return math.exp(min(own, 20.0)), False
    log_r = {
        "token": token.log_ratio,
        "sequence": sum(other.log_ratio for other in sample),
        "sequence_mean": _mean_log_ratio(sample),
    }[options["importance_level"]]
    is_above = result.is_beyond(log_r, math.log(cap))
    if kind == "truncated":
        return cap if is_above else math.exp(log_r), False
    is_below = result.is_beyond(-log_r, math.log(cap))
    return math.exp(min(own, 20.0)), is_above or is_below


def _mean_log_ratio(sample: Sequence[PlainToken]) -> float:
    return sum(token.log_ratio for token in sample) / len(sample)


def _gain(
    name: str,
    result: PlainLoss,
    token: PlainToken,
    own: float,
    weight: float,
    options: dict[str, Any],
) -> Gain:
    """What the limit of each loss leaves of A·weight."""
    advantage, kept = token.advantage, (token.advantage * weight, token.advantage * weight)
    shift = math.exp(token.policy) - math.exp(token.sampling)
    if name == "dppo":
        wanted = shift if advantage > 0 else -shift
        return (0.0, 0.0) if result.is_beyond(wanted, options["threshold"]) else kept
    if name == "ipo":
        return (0.0, 0.0) if result.is_beyond(abs(shift), options["threshold"]) else kept
    if name == "cispo":
        slope = advantage * min(weight, options["ratio_cap"])
        return slope * token.policy, slope
    ratio = math.exp(min(own, 20.0))
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]
    if advantage > 0 and result.is_beyond(ratio, high):
        return advantage * high, 0.0
    if advantage < 0 and result.is_beyond(-ratio, -low):
        return advantage * low, 0.0
    return kept


_COMMON: dict[str, Any] = {
    "kl_coefficient": 0.0,
    "entropy_coefficient": 0.0,
    "reference_kl_coefficient": 0.0,
    "reference_kl_estimator": "k2",
    "importance_sampling": "off",
    "importance_level": "token",
    "importance_cap": 2.0,
}
_OWN: dict[str, dict[str, Any]] = {
    "dppo": {"threshold": 0.2, "kl_coefficient": 1e-3},
    "ipo": {"threshold": 0.1, "kl_coefficient": 1e-3},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {"ratio_cap": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}

"""Ratios of policy and sampling probabilities of the rl tokens: mismatch KL, peaks and percentiles.

Percentiles come from counts in steps of 7 % of |ln ratio| on each side of 0, because counts of
micro batches and ranks can be added and percentiles cannot. Shapes: T tokens of a micro batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradus.trainer.distributed import World
from gradus.trainer.losses import MAX_LOG_RATIO, clamped_exp
from gradus.trainer.tensors import ReadyMicroBatch
from gradus.wire.versions import staleness

COUNTS = "ln_ratio/counts"
"""Among the shares: tokens by their log ratio, float64 [405]."""
_STEPS_PER_DECADE, _LEAST_EXPONENT, _NUM_STEPS = 32, -5, 202
"""From 1e-5, below which a log ratio counts as 0, to MAX_LOG_RATIO."""


@torch.no_grad()
def ratio_shares(log_ratio: Tensor, mask: Tensor, denominator: float) -> dict[str, Tensor]:
    """Of the members, float64: mean and largest mismatch KL = ratio - ln ratio - 1, the largest
    ratio, which is the largest weight that a loss without a bound gives a token, and their counts.
    """
    log_ratio = torch.where(mask, log_ratio, 0.0)
    ratio = clamped_exp(log_ratio)
    mismatch = torch.where(mask, ratio - log_ratio - 1.0, 0.0)
    return {
        "mismatch_kl/mean": mismatch.sum(dtype=torch.float64) / denominator,
        "mismatch_kl/max": mismatch.max().double(),
        "ratio/max": torch.where(mask, ratio, 0.0).max().double(),
        COUNTS: _count(log_ratio, mask),
    }


@torch.no_grad()
def _count(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Members by their log ratio; one that is not a number counts with the largest."""
    finite = log_ratio.detach().float().nan_to_num(nan=MAX_LOG_RATIO)
    steps = (finite.abs().clamp(1e-30, MAX_LOG_RATIO).log10() - _LEAST_EXPONENT) * _STEPS_PER_DECADE
    # By arithmetic, because a search among the borders takes thirty times as long on a CPU.
    places = _NUM_STEPS + finite.sign() * (steps.floor() + 1.0).clamp(0, _NUM_STEPS)
    counts = torch.zeros(2 * _NUM_STEPS + 1, dtype=torch.float64, device=log_ratio.device)
    return counts.index_add(0, places.long(), mask.double())


def spread(world: World, shares: Mapping[str, Tensor]) -> dict[str, float]:
    """Percentiles of ratio and mismatch KL over all ranks, within 4 % of ln ratio and 8 % of KL,
    and how many tokens of one weight tell as much, as a share of all."""
    if COUNTS not in shares:
        return {}
    counts = world.added_up(shares[COUNTS])
    sizes = [
        min(MAX_LOG_RATIO, 10.0 ** (_LEAST_EXPONENT + (step + 0.5) / _STEPS_PER_DECADE))
        for step in range(_NUM_STEPS)
    ]
    middles = [*(-size for size in reversed(sizes)), 0.0, *sizes]
    ratios = [(math.exp(middle), count) for middle, count in zip(middles, counts, strict=True)]
    kls = sorted(
        (ratio - middle - 1.0, n) for middle, (ratio, n) in zip(middles, ratios, strict=True)
    )
    weight, squares = (sum(ratio**power * n for ratio, n in ratios) for power in (1, 2))
    return {
        "effective_tokens/share": weight**2 / (sum(counts) * squares) if squares else 0.0,
        **{f"ratio/p{percent}": _percentile(ratios, percent) for percent in (5, 50, 95)},
        **{f"mismatch_kl/p{percent}": _percentile(kls, percent) for percent in (50, 95)},
    }


def _percentile(counted: Sequence[tuple[float, float]], percent: int) -> float:
    """The least value that so many do not exceed; `counted` are values with counts, in order."""
    wanted = percent * sum(count for _, count in counted) / 100
    reached = 0.0
    for value, count in counted:
        reached += count
        if count and reached >= wanted:
            return value
    return counted[-1][0]


@torch.no_grad()
def drift_metrics(
    micro_batches: Sequence[ReadyMicroBatch], version: int, world: World
) -> dict[str, float]:
    """KL from what the engine said of the rl tokens to what the trainer says at `version`: where
    that version sampled them the engine alone makes the difference, elsewhere staleness too."""
    zero = torch.zeros((), dtype=torch.float64, device=world.device)
    sums = dict.fromkeys(("engine", "engine_tokens", "stale", "stale_tokens"), zero)
    for micro_batch in micro_batches:
        tensors = micro_batch.tensors
        assert tensors.proximal_logprobs is not None
        drift = tensors.proximal_logprobs - tensors.sampling_logprobs
        kl = clamped_exp(drift) - drift - 1.0
        ages = [staleness(version, span) for span in micro_batch.versions]
        is_stale = torch.tensor([age > 0 for age in ages] or [False])
        is_stale = is_stale.index_select(0, tensors.sample_index)
        for name, mask in (("stale", is_stale), ("engine", ~is_stale)):
            counted = mask & tensors.members("rl")
            total = torch.where(counted, kl, 0.0).sum(dtype=torch.float64)
            sums[name] = sums[name] + total.to(world.device)
            sums[f"{name}_tokens"] = sums[f"{name}_tokens"] + counted.sum().to(world.device)
    totals = world.sums(sums)
    return {
        f"loss/{name}_kl/mean": totals[name] / totals[f"{name}_tokens"]
        for name in ("engine", "stale")
        if totals[f"{name}_tokens"]
    }

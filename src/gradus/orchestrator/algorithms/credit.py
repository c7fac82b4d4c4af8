"""Formulas of credit: rewards of one group in, advantages out (pure; arrays have shape [N]).

Rewards are sums of weighted parts, so 0.1 + 0.2 and 0.3 count as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradus.config import algorithms

Floats = NDArray[np.float64]

_RELATIVE = 1e-9
"""Rounding, as a share of the larger number."""
_RELATIVE_FLOAT32 = 1e-6
"""The same for rewards that were added up in float32, e.g. by torch."""
_ABSOLUTE = 1e-14
"""What is left where parts near 1 cancel, such as 0.1 + 0.2 - 0.3."""


def tolerance(scale: float) -> float:
    """How much two numbers may differ by rounding when the larger one has size `scale`."""
    return max(_RELATIVE * abs(scale), _ABSOLUTE)


def are_equal(values: Iterable[float], *, relative: float = _RELATIVE) -> bool:
    """Tell whether all values are one and the same up to rounding; true for none.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.3, 0.3001])
    (True, False)
    """
    known = list(values)
    if not known:
        return True
    lowest, highest = min(known), max(known)
    scale = max(abs(lowest), abs(highest))
    return highest - lowest <= max(relative * scale, _ABSOLUTE)


def is_at_least(value: float, bound: float) -> bool:
    """`value >= bound`, or less than it by rounding alone.

    >>> is_at_least(0.1 + 0.2 + 0.3 + 0.4 - 1e-16, 1.0)
    True
    """
    return value >= bound or are_equal([value, bound])


def centre(rewards: Floats) -> Floats:
    """r_i - mean(r); exactly zero when all are equal up to rounding, which must train nothing.

    >>> centre(np.array([1.0, 0.0])).tolist()
    [0.5, -0.5]
    """
    if are_equal(rewards.tolist()):
        return np.zeros_like(rewards)
    return np.asarray(rewards - rewards.mean())


def centre_leave_one_out(rewards: Floats) -> Floats:
    """r_i - mean of the other rewards (RLOO); zero for a single reward."""
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return centre(rewards) * (rewards.size / (rewards.size - 1))


def divide_by_std(advantages: Floats, rewards: Floats) -> Floats:
    """A_i / std(r), the population's; zero where the rewards differ by rounding alone, of float32
    too: divided by their own size, the smallest differences become whole advantages."""
    if are_equal(rewards.tolist(), relative=_RELATIVE_FLOAT32):
        return np.zeros_like(advantages)
    return np.asarray(advantages / rewards.std())


def divide_by_mean(advantages: Floats, rewards: Floats) -> Floats:
    """A_i / mean(r); zero where the mean is not positive."""
    if rewards.size == 0 or rewards.mean() <= 0:
        return np.zeros_like(advantages)
    return np.asarray(advantages / rewards.mean())


def penalise_length(
    rewards: Floats,
    *,
    output_tokens: Sequence[int],
    input_tokens: Sequence[int],
    turns: Sequence[int],
    weights: Mapping[algorithms.LengthPart, float],
) -> Floats:
    """r_i - |mean(r)|·(w_output·out_i/max out + w_input·in_i/max in + w_turns·turns_i/max turns).

    The size of the mean, not the mean: a group with a negative one must not gain by length. A part
    without a weight weighs 0.
    """
    if rewards.size == 0:
        return rewards
    share = (
        weights.get("output", 0.0) * _share_of_largest(output_tokens)
        + weights.get("input", 0.0) * _share_of_largest(input_tokens)
        + weights.get("turns", 0.0) * _share_of_largest(turns)
    )
    return np.asarray(rewards - abs(rewards.mean()) * share)


def penalise_overlong(
    rewards: Floats, *, output_tokens: Sequence[int], limit_tokens: int, cache_tokens: int
) -> Floats:
    """DAPO's soft punishment: nothing until `cache_tokens` before the limit, from there down to -1.

    r_i - min(1, max(0, (out_i - (limit - cache)) / cache)), arXiv 2503.14476, equation 13.
    """
    lengths = np.asarray(output_tokens, dtype=np.float64)
    excess = (lengths - (limit_tokens - cache_tokens)) / cache_tokens
    return np.asarray(rewards - np.clip(excess, 0.0, 1.0))


def _share_of_largest(counts: Sequence[int]) -> Floats:
    values = np.asarray(counts, dtype=np.float64)
    return np.asarray(values / max(values.max(), 1.0))

"""Formulas of credit: rewards of one group in, advantages out (pure; arrays have shape [N])."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def centre(rewards: Floats) -> Floats:
    """r_i - mean(r); exactly zero when all are equal, so that rounding never trains anything.

    >>> centre(np.array([1.0, 0.0])).tolist()
    [0.5, -0.5]
    """
    if rewards.size == 0 or rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    return np.asarray(rewards - rewards.mean())


def centre_leave_one_out(rewards: Floats) -> Floats:
    """r_i - mean of the other rewards (RLOO); zero for a single reward."""
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return centre(rewards) * (rewards.size / (rewards.size - 1))


def divide_by_std(advantages: Floats, rewards: Floats) -> Floats:
    """A_i / std(r), the population's; zero where the rewards do not differ."""
    if rewards.size == 0 or rewards.max() == rewards.min():
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
) -> Floats:
    """r_i - mean(r)·(0.25·out_i/max out + 0.1·in_i/max in + 0.1·turns_i/max turns)."""
    if rewards.size == 0:
        return rewards
    share = (
        0.25 * _share_of_largest(output_tokens)
        + 0.1 * _share_of_largest(input_tokens)
        + 0.1 * _share_of_largest(turns)
    )
    return np.asarray(rewards - rewards.mean() * share)


def _share_of_largest(counts: Sequence[int]) -> Floats:
    values = np.asarray(counts, dtype=np.float64)
    return np.asarray(values / max(values.max(), 1.0))

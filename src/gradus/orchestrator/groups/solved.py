"""Whether a group earned all that there is to earn, which is why it has nothing to train (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

FULL_REWARD = 1.0
"""What a solved task earns where rewards lie between 0 and 1."""
_TOLERANCE = 1e-6


class EarnedRange(msgspec.Struct):
    """The lowest and the highest reward that an episode of a source has earned."""

    lowest: float = math.inf
    highest: float = -math.inf


class EarnedRanges(msgspec.Struct):
    """By source."""

    of_sources: dict[str, EarnedRange] = {}


class RewardRanges:
    """Owns the lowest and the highest reward that an episode of each source has earned.

    Equal rewards alone prove nothing: a policy may be stuck. A group counts as solved when each of
    its episodes earned the full reward and some episode of the run earned less: a reward that never
    differs says nothing about the policy. The full reward is what the source declares; without
    that it is 1, as long as no reward of the run was below 0 or above 1. On another scale nothing
    says what the best is, so no group counts as solved.

    >>> ranges = RewardRanges({})
    >>> [ranges.is_solved("words", rewards, size=2) for rewards in ([1.0, 1.0], [0.0, 1.0])]
    [False, False]
    >>> ranges.is_solved("words", [1.0, 1.0], size=2)
    True
    """

    def __init__(self, declared: Mapping[str, float]) -> None:
        """`declared` is the largest possible reward of the sources that say so."""
        self._declared = declared
        self.state = EarnedRanges()

    def is_solved(self, source: str, rewards: Sequence[float], *, size: int) -> bool:
        """Note the rewards of a group of `size` episodes: did all of them earn the most?"""
        if not rewards:
            return False
        known = self.state.of_sources.setdefault(source, EarnedRange())
        known.lowest = min([known.lowest, *rewards])
        known.highest = max([known.highest, *rewards])
        full = self._declared.get(source, FULL_REWARD)
        tolerance = _TOLERANCE * max(abs(full), 1.0)
        if known.highest > full + tolerance:
            return False
        if source not in self._declared and known.lowest < -tolerance:
            return False
        return size == len(rewards) and min(rewards) >= full - tolerance > known.lowest

"""Means that merge and percentiles: what many values become in a record (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_NAMES = 200
"""Names of values that one environment may bring into one record."""
PERCENTILES = (5, 50, 95)


@dataclass(frozen=True)
class Mean:
    """A weighted mean in parts that merge in any order; means of means would not."""

    total: float
    """Sum of weight x value."""
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


def mean(values: Iterable[float]) -> float:
    """Of at least one value."""
    chosen = list(values)
    return sum(chosen) / len(chosen)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of at least one value; NaN where one is not finite."""
    middle = mean(values)
    apart = (value - middle for value in values)
    return math.sqrt(mean(it * it for it in apart))


def percentiles(
    name: str, values: Sequence[float], which: Sequence[int] = PERCENTILES
) -> dict[str, float]:
    """`<name>/p<percent>` of each, the smallest value that so many do not exceed; nothing without
    values.

    >>> percentiles("turns", [1.0, 2.0, 9.0], (50, 95))
    {'turns/p50': 2.0, 'turns/p95': 9.0}
    """
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"{name}/p{percent}": float(ordered[max(0, -(-percent * len(ordered) // 100) - 1)])
        for percent in which
    }

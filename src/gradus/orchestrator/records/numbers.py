"""Means that merge and percentiles: what many values become in a record (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def savable(value: float) -> float | str:
    """JSON has no number for what is not finite: a metric that is not becomes text, as "nan"."""
    return float(value) if math.isfinite(value) else str(float(value))


def saved_means(means: Mapping[str, Mean]) -> dict[str, list[float | str]]:
    """As JSON values."""
    return {name: [savable(it.total), it.weight] for name, it in means.items()}


def load_means(saved: Mapping[str, Sequence[float | str]]) -> dict[str, Mean]:
    """What `saved_means` gave."""
    return {name: Mean(*map(float, parts)) for name, parts in saved.items()}

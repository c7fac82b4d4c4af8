"""Partial results of metrics, merged in any order and reduced once, at the end.

Only partials cross a process: a mean of means is wrong as soon as the parts differ in size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A weighted mean in the making."""

    total: float
    """Sum of weight x value."""
    weight: float = 1.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of single values, each of weight 1."""
        listed = list(values)
        return cls(sum(listed), len(listed))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float | None:
        """None when nothing was counted."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True)
class Sum:
    """A sum in the making."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return self.total


@dataclass(frozen=True)
class Max:
    """The largest value so far."""

    largest: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    def value(self) -> float | None:
        return self.largest


@dataclass(frozen=True)
class Min:
    """The smallest value so far."""

    smallest: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    def value(self) -> float | None:
        return self.smallest


Partial = Mean | Sum | Max | Min


class Partials:
    """Partials by metric key.

    >>> partials = Partials()
    >>> partials.add("episode/reward/mean", Mean.of([0.0, 1.0]))
    >>> partials.add("episode/reward/mean", Mean.of([1.0, 1.0]))
    >>> partials.reduce()
    {'episode/reward/mean': 0.75}
    """

    def __init__(self) -> None:
        self._by_key: dict[str, Partial] = {}

    def add(self, key: str, partial: Partial) -> None:
        """Merge `partial` into what `key` has; refuses to mix kinds under one key."""
        known = self._by_key.get(key)
        if known is None:
            self._by_key[key] = partial
            return
        if type(known) is not type(partial):
            raise ValueError(
                f"metric {key!r} is a {type(known).__name__}, cannot merge "
                f"a {type(partial).__name__} into it"
            )
        self._by_key[key] = known.merge(partial)  # type: ignore[arg-type]

    def merge(self, other: Partials) -> None:
        """Merge everything that `other` holds."""
        for key, partial in other._by_key.items():
            self.add(key, partial)

    def reduce(self) -> dict[str, float]:
        """The values; a mean of nothing is left out."""
        values = {key: partial.value() for key, partial in self._by_key.items()}
        return {key: value for key, value in values.items() if value is not None}

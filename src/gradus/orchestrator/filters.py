"""Filters drop finished samples that would not help the step; metrics count them all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gradus.plugins import find_plugin
from gradus.wire.sample import Sample


class Filter(Protocol):
    """A verdict on one sample."""

    name: str
    """The reason in records and counters."""

    def keeps(self, sample: Sample) -> bool:
        """False drops the sample."""
        ...


class ZeroAdvantage:
    """Drops samples without any gradient: every advantage is 0 and no other loss is weighed.

    >>> ZeroAdvantage().name
    'zero_advantage'
    """

    name = "zero_advantage"

    def keeps(self, sample: Sample) -> bool:
        """False when no token has credit."""
        for loss, weights in sample.loss_weights.items():
            credit = weights if loss != "rl" else weights * sample.advantages
            if bool(np.any(credit)):
                return True
        return False


FILTERS: dict[str, type] = {"zero_advantage": ZeroAdvantage}
"""Registered names; anything else is "package.module:Class"."""


def build_filters(names: Sequence[str]) -> list[Filter]:
    """The filters by their names, in order."""
    return [find_plugin("filter", name, FILTERS)() for name in names]


def dropped_by(filters: Sequence[Filter], sample: Sample) -> str | None:
    """Name of the first filter that drops the sample; None when all keep it."""
    return next((f.name for f in filters if not f.keeps(sample)), None)

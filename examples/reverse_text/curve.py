"""The reward curve of a run: read from `metrics.jsonl`, drawn with characters."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REWARD = "episode/reward/mean"
LAST_STEPS = 3
"""Steps that "at the end" averages over."""


@dataclass(frozen=True)
class Curve:
    """One number per step, in step order."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def first(self) -> float:
        """The value of the first step: the policy before any update."""
        return self.values[0]

    @property
    def last(self) -> float:
        """Mean of the last steps."""
        return statistics.fmean(self.values[-LAST_STEPS:])


def read_curve(metrics: Path, key: str = REWARD) -> Curve:
    """The curve of `key`; refuses a file without a single value of it."""
    by_step: dict[int, float] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get(key) is not None:
            by_step[record["step"]] = record[key]
    if not by_step:
        raise ValueError(f"{metrics} holds no value of {key!r}; did the run make a step?")
    steps = sorted(by_step)
    return Curve(tuple(steps), tuple(by_step[step] for step in steps))


def draw_curve(values: Sequence[float], *, height: int = 11, width: int = 60) -> list[str]:
    """Lines of a plot of values in [0, 1]; each value is a bar of two columns or less.

    >>> print(*draw_curve([0.0, 1.0], height=2, width=4), sep="\\n")
    1.0 |  ##
    0.0 |####
        +----
    """
    columns = max(1, min(2, width // len(values)))
    lines = []
    for row in range(height - 1, -1, -1):
        level = row / (height - 1)
        half = 0.5 / (height - 1)
        cells = ("#" if value >= level - half else " " for value in values)
        lines.append(f"{level:.1f} |" + "".join(cell * columns for cell in cells))
    return [*lines, "    +" + "-" * columns * len(values)]

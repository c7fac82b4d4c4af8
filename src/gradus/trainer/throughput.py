"""Seconds of each rung of a step, and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Measures one step.

    >>> watch = Stopwatch()
    >>> with watch.measure("optimize"):
    ...     pass
    >>> sorted(watch.metrics())
    ['time/optimize_seconds', 'time/step_seconds']
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, rung: str) -> Iterator[None]:
        """Add the time inside the block to `rung`."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[rung] = self._seconds.get(rung, 0.0) + self._clock() - start

    def seconds(self, rung: str) -> float:
        """Time spent in `rung` so far; 0 when it never ran."""
        return self._seconds.get(rung, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/<rung>_seconds` of every rung, and `time/step_seconds` since the start."""
        rungs = {f"time/{name}_seconds": value for name, value in self._seconds.items()}
        return rungs | {"time/step_seconds": self._clock() - self._start}

    def trained_tokens_per_second(self, tokens: int) -> float:
        """Tokens read in forward and backward over the time of learning, without waiting."""
        learning = self.seconds("forward_backward") + self.seconds("optimize")
        return tokens / learning if learning > 0 else 0.0

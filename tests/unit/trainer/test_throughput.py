"""The stopwatch of a step, on a clock of its own."""

from __future__ import annotations

import pytest

from gradus.trainer.throughput import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rungs_add_up_and_the_step_counts_from_the_start() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(2):
        with watch.measure("optimize"):
            clock.now += 1.5
    clock.now += 1.0
    assert watch.metrics() == {"time/optimize_seconds": 3.0, "time/step_seconds": 4.0}


def test_a_rung_that_fails_is_measured_too() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.measure("receive"):
            clock.now += 2.0
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert watch.seconds("receive") == 2.0


def test_waiting_does_not_count_as_learning() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for rung, seconds in (("receive", 8.0), ("forward_backward", 1.5), ("optimize", 0.5)):
        with watch.measure(rung):
            clock.now += seconds
    assert watch.trained_tokens_per_second(100) == 50.0


def test_a_step_without_learning_has_no_speed() -> None:
    assert Stopwatch(Clock()).trained_tokens_per_second(100) == 0.0

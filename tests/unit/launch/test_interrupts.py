"""Signals are noted, and the handlers of others come back."""

from __future__ import annotations

import signal

import pytest

from gradus.launch.launch import Interrupted, Interrupts


def test_without_a_signal_nothing_happens() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        assert not interrupts.is_urgent


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)],
)
def test_a_signal_is_raised_at_the_next_look(number: signal.Signals, exit_code: int) -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        with pytest.raises(Interrupted, match="stopped by") as caught:
            interrupts.check()
        assert caught.value.exit_code == exit_code
        assert not interrupts.is_urgent


@pytest.mark.shows("F70")
def test_the_first_signal_decides_and_the_second_is_urgent() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.is_urgent
        with pytest.raises(Interrupted, match="stopped by SIGTERM"):
            interrupts.check()


def test_the_handlers_of_others_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before

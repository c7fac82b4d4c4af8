"""Signals that ask a launch to end, noted until it looks."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from gradus.errors import ExitCode

_EXIT_CODES = {
    signal.SIGINT: 130,
    signal.SIGTERM: int(ExitCode.TRY_AGAIN),
    signal.SIGHUP: int(ExitCode.TRY_AGAIN),
}


class Interrupted(Exception):
    """The launch was asked to end."""

    def __init__(self, number: int) -> None:
        self.exit_code = _EXIT_CODES[signal.Signals(number)]
        self.is_from_outside = number != signal.SIGINT
        """Whether a scheduler or the system asks, and not a person at the terminal."""
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {what}")


class Interrupts:
    """Holds the handlers of SIGINT, SIGTERM and SIGHUP inside a `with` block.

    >>> with Interrupts() as interrupts:
    ...     interrupts.check()
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _EXIT_CODES:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self._received:
            raise Interrupted(self._received[0])

    @property
    def is_from_outside(self) -> bool:
        """Whether a scheduler or the system asks to end."""
        return bool(self._received) and self._received[0] != signal.SIGINT

    @property
    def count(self) -> int:
        return len(self._received)

    @property
    def is_urgent(self) -> bool:
        """Whether a second signal came, after which nothing is waited for."""
        return len(self._received) > 1

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received.append(number)

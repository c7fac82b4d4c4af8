"""Waiting for a condition with a deadline, for tests; the only place that sleeps for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_PAUSE_SECONDS = 0.005


def wait_until(
    condition: Callable[[], object], *, timeout_seconds: float = 10.0, what: str = "the condition"
) -> None:
    """Return as soon as `condition()` is true; AssertionError after `timeout_seconds`.

    >>> wait_until(lambda: True)
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true in {timeout_seconds:g} s")
        time.sleep(_PAUSE_SECONDS)


async def wait_until_async(
    condition: Callable[[], object], *, timeout_seconds: float = 10.0, what: str = "the condition"
) -> None:
    """`wait_until` that lets the event loop run meanwhile."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true in {timeout_seconds:g} s")
        await asyncio.sleep(_PAUSE_SECONDS)

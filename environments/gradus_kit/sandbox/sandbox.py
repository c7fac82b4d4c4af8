"""The sandbox: runs programs of a model, a few at once, each in a separate box."""

from __future__ import annotations

import asyncio
import os
import time
import weakref

from gradus_kit.sandbox.box import RunningBox
from gradus_kit.sandbox.isolation import claimed_user
from gradus_kit.sandbox.machine import find_isolation
from gradus_kit.sandbox.order import order_of
from gradus_kit.sandbox.program import Ended, Limits, Reason, UntrustedProgram, reason_of


class Sandbox:
    """Runs programs, at most `max_running` at once, each in a fresh process.

    A program sees system libraries to read and a memory disk to write: no network, no other
    process, no file of ours, and nothing of it stays. However it ends, `run` returns;
    `SandboxError` means that the box itself could not be made. ConfigError where bubblewrap does
    not work.
    """

    def __init__(self, limits: Limits | None = None, *, max_running: int | None = None) -> None:
        self.limits = limits or Limits()
        self.isolation = find_isolation()
        self._max_running = max_running or max(2, os.cpu_count() or 2)
        # A semaphore belongs to one event loop.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = weakref.WeakKeyDictionary()
        self._endings: set[asyncio.Task[None]] = set()

    async def run(self, program: UntrustedProgram, limits: Limits | None = None) -> Ended:
        """Run one program to its end, or to the limit that it meets first."""
        bounds = limits or self.limits
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._max_running))
        async with slots:
            with claimed_user(self.isolation) as user:
                return await self._run_as(user, program, bounds)

    async def _run_as(self, user: int | None, program: UntrustedProgram, limits: Limits) -> Ended:
        began = time.monotonic()
        order = order_of(self.isolation, program, limits)
        box = RunningBox(self.isolation, user, limits)
        try:
            box.start(order, program.stdin.encode("utf-8", "surrogatepass"))
            await box.wait_until_ready()
            stopped = await box.wait(limits.seconds)
        finally:
            await self._end(box)
        stderr = box.stderr.text()
        if box.stdout.is_over or box.stderr.is_over:
            stopped = Reason.OUTPUT
        reason, code = (stopped, None) if stopped else reason_of(box.status, stderr)
        seconds = time.monotonic() - began
        return Ended(reason, code, box.stdout.text(), stderr, seconds)

    async def _end(self, box: RunningBox) -> None:
        """End all of a box, also when the one who waits is cancelled again."""
        ending = asyncio.create_task(box.end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)

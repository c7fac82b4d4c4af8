"""The sandbox: runs programs of a model, a few at once, each in a separate box."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus_kit.sandbox.box import RunningBox
from gradus_kit.sandbox.isolation import Isolation, Protection, claimed_user
from gradus_kit.sandbox.machine import (
    make_folder,
    missing_in,
    refusal,
    remove_folder,
    strongest_isolation,
)
from gradus_kit.sandbox.order import order_of
from gradus_kit.sandbox.program import Ended, Limits, Reason, UntrustedProgram, reason_of

log = get_logger(__name__)


class Sandbox:
    """Runs programs, at most `max_running` at once, each in a fresh process.

    `require` names protections without which it refuses to exist; what a program could read on
    this disk may be the answer, so by default `files`. However a program ends, `run`
    returns; `SandboxError` means that the box itself could not be made.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        max_running: int | None = None,
        require: Iterable[Protection | str] = (Protection.FILES,),
        isolation: Isolation | None = None,
    ) -> None:
        self.limits = limits or Limits()
        required = frozenset(map(str, require))
        self.isolation = isolation or strongest_isolation(required)
        if missing_in(self.isolation, required):
            raise ConfigError(refusal(self.isolation, required))
        if missing_in(self.isolation, frozenset([Protection.FILES])):
            log.warning(
                "programs of a model can read the files of this machine (%s)", self.isolation.name
            )
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
                async with _folder(self.isolation, user) as folder:
                    return await self._run_in(folder, user, program, bounds)

    async def _run_in(
        self, folder: Path, user: int | None, program: UntrustedProgram, limits: Limits
    ) -> Ended:
        began = time.monotonic()
        mark = secrets.token_hex(8)
        order = order_of(self.isolation, folder, user, program, limits, mark=mark)
        box = RunningBox(self.isolation, user, folder, limits)
        try:
            box.start(order, program.stdin.encode("utf-8", "surrogatepass"))
            await box.wait_until_ready()
            stopped = await box.wait(limits.seconds)
        finally:
            await self._end(box, mark)
        stderr = box.stderr.text()
        if box.stdout.is_over or box.stderr.is_over:
            stopped = Reason.OUTPUT
        reason, code = (stopped, None) if stopped else reason_of(box.status, stderr)
        seconds = time.monotonic() - began
        held = self.isolation.held
        return Ended(reason, code, box.stdout.text(), stderr, seconds, self.isolation.name, held)

    async def _end(self, box: RunningBox, mark: str) -> None:
        """End all of a box, also when the one who waits is cancelled again."""
        ending = asyncio.create_task(box.end(mark))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)


@contextlib.asynccontextmanager
async def _folder(isolation: Isolation, user: int | None) -> AsyncIterator[Path]:
    """The program's folder while it runs."""
    folder = make_folder(isolation, user)
    try:
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(remove_folder, isolation, folder))

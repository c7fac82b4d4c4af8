"""One running box: the process, its three pipes, and the end of everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

from gradus.errors import SandboxError
from gradus_kit.sandbox.isolation import BWRAP, Isolation, as_user
from gradus_kit.sandbox.order import launch_words, memory_file
from gradus_kit.sandbox.program import Limits, Reason

_START_SECONDS = 30.0
_KILL_SECONDS = 10.0
_READ_BYTES = 1 << 16


class _Pipe:
    """Collects what comes out of a pipe, in the event loop, up to one byte above a cap."""

    def __init__(self, cap: int, heard: Callable[[_Pipe], None]) -> None:
        self._cap = cap
        self._heard = heard
        self.collected = bytearray()
        self.is_open = True
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)

    @property
    def is_over(self) -> bool:
        return len(self.collected) > self._cap

    def listen(self) -> None:
        """Close our copy of the writing end, and read whenever something is there."""
        os.close(self.writing)
        self.writing = -1
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    def _read(self) -> bool:
        try:
            block = os.read(self._reading, min(_READ_BYTES, self._cap + 1 - len(self.collected)))
        except BlockingIOError:
            return False
        self.collected += block
        if not block or self.is_over:
            self._stop()
        self._heard(self)
        return self.is_open

    def drain(self) -> None:
        """Read what is still in the pipe, and close it."""
        while self.is_open and self._read():
            pass
        self._stop()
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def _stop(self) -> None:
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)

    def text(self) -> str:
        return bytes(self.collected[: self._cap]).decode("utf-8", "replace")


class RunningBox:
    """Owns a started program until `end`."""

    def __init__(self, isolation: Isolation, user: int | None, limits: Limits) -> None:
        self._isolation = isolation
        self._user = user
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[Reason | None] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self.stdout = _Pipe(limits.output_bytes, self._heard_output)
        self.stderr = _Pipe(limits.output_bytes, self._heard_output)
        self._said = _Pipe(1000, self._heard_launcher)
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptor = -1

    @property
    def status(self) -> int:
        """The return code of the process, which has ended."""
        assert self._process is not None
        assert self._process.returncode is not None
        return self._process.returncode

    def start(self, order: bytes, stdin: bytes) -> None:
        """Start the launcher in the box.

        From the thread of the event loop, which lives as long as the program may: the kernel ends
        a boxed program with the thread that started it.
        """
        with memory_file("order", order) as order_fd, memory_file("stdin", stdin) as stdin_fd:
            said = self._said.writing
            try:
                self._process = subprocess.Popen(
                    launch_words(self._isolation, self._limits, order_fd, said),
                    stdin=stdin_fd,
                    stdout=self.stdout.writing,
                    stderr=self.stderr.writing,
                    pass_fds=(order_fd, said),
                    cwd="/",
                    env={"PATH": "/usr/bin:/bin"},
                    start_new_session=True,
                    **as_user(self._user),
                )
            except OSError as error:
                raise SandboxError(f"the sandbox cannot start {BWRAP}: {error}") from error
        self._descriptor = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._descriptor, self._heard_end)
        for pipe in (self.stdout, self.stderr, self._said):
            pipe.listen()

    async def wait_until_ready(self) -> None:
        """Return when the launcher has set every limit; SandboxError when it cannot."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._ready
        except TimeoutError:
            raise SandboxError(f"the sandbox was not ready within {_START_SECONDS:.0f} s") from None

    async def wait(self, seconds: float) -> Reason | None:
        """Why the program must be ended, or None when it ended by itself."""
        try:
            async with asyncio.timeout(seconds):
                return await self._stopped
        except TimeoutError:
            return Reason.DEADLINE

    async def end(self) -> None:
        """Kill everything that the program started, and read what it had written."""
        process = self._process
        if process is not None:
            # The process was not waited for, so its number still names its group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await self._collect(process)
        for pipe in (self.stdout, self.stderr, self._said):
            pipe.drain()
        for future in (self._stopped, self._ready):
            future.cancel()

    async def _collect(self, process: subprocess.Popen[bytes]) -> None:
        if self._descriptor >= 0:
            await asyncio.wait({self._gone}, timeout=_KILL_SECONDS)
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"process {process.pid} of the sandbox cannot be killed") from None

    def _heard_launcher(self, pipe: _Pipe) -> None:
        if self._ready.done():
            return
        if pipe.collected == b"+":
            self._ready.set_result(None)
        elif not pipe.is_open:
            said = pipe.text() or self.stderr.text().strip() or "it says nothing"
            self._ready.set_exception(SandboxError(f"the sandbox did not start: {said[-500:]}"))

    def _heard_output(self, pipe: _Pipe) -> None:
        if pipe.is_over and not self._stopped.done():
            self._stopped.set_result(Reason.OUTPUT)

    def _heard_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if not self._gone.done():
            self._gone.set_result(None)
        if not self._stopped.done():
            self._stopped.set_result(None)

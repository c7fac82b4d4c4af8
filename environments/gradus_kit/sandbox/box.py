"""One running box: the process, its three pipes, and the end of everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from gradus.errors import SandboxError
from gradus.log import get_logger
from gradus.processes.table import carries_mark, living_processes, signal_process
from gradus_kit.sandbox.isolation import Isolation, as_user
from gradus_kit.sandbox.order import MARK, launch_words, memory_file
from gradus_kit.sandbox.program import Limits, Reason

_START_SECONDS = 30.0
_KILL_SECONDS = 10.0
_KILL_ROUNDS = 100
_ROUNDS_BEFORE_KILLING_ALL = 5
_READ_BYTES = 1 << 16
_LOG = get_logger(__name__)


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

    def __init__(
        self, isolation: Isolation, user: int | None, folder: Path, limits: Limits
    ) -> None:
        self._isolation = isolation
        self._user = user
        self._folder = folder
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
                    cwd=self._folder,
                    env={"PATH": "/usr/bin:/bin"},
                    start_new_session=True,
                    **as_user(self._user),
                )
            except OSError as error:
                raise SandboxError(
                    f"the sandbox cannot start {self._isolation.name}: {error}"
                ) from error
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
            raise SandboxError(
                f"the sandbox ({self._isolation.name}) was not ready within {_START_SECONDS:.0f} s"
            ) from None

    async def wait(self, seconds: float) -> Reason | None:
        """Why the program must be ended, or None when it ended by itself."""
        try:
            async with asyncio.timeout(seconds):
                return await self._stopped
        except TimeoutError:
            return Reason.DEADLINE

    async def end(self, mark: str) -> None:
        """Kill everything that the program started, and read what it had written."""
        process = self._process
        if process is not None:
            # The process was not waited for, so its number still names its group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if not self._isolation.has_namespaces:
                await self._sweep(process.pid, mark)
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

    async def _sweep(self, session: int, mark: str) -> None:
        """Kill what the program left behind, until nothing is found any more."""
        for round_number in range(_KILL_ROUNDS):
            left = [pid for pid in self._left_behind(session, mark) if pid != session]
            if not left:
                return
            for pid in left:
                signal_process(pid, signal.SIGKILL)
            if self._user is not None and round_number >= _ROUNDS_BEFORE_KILLING_ALL:
                # Processes that start others faster than we look are hit by one signal for all.
                subprocess.run(
                    [self._isolation.python, "-I", "-S", "-c", "import os; os.kill(-1, 9)"],
                    check=False,
                    timeout=_KILL_SECONDS,
                    **as_user(self._user),
                )
            await asyncio.sleep(0.002)
        _LOG.error("a program of the sandbox left processes that cannot be killed: %s", left)

    def _left_behind(self, session: int, mark: str) -> list[int]:
        if self._user is not None:
            return _processes_of(self._user)
        return [
            entry.pid
            for entry in living_processes()
            if entry.session == session
            or carries_mark(entry.pid, MARK, mark)
            or _works_in(entry.pid, self._folder)
        ]

    def _heard_launcher(self, pipe: _Pipe) -> None:
        if self._ready.done():
            return
        if pipe.collected == b"+":
            self._ready.set_result(None)
        elif not pipe.is_open:
            said = pipe.text() or self.stderr.text().strip() or "it says nothing"
            self._ready.set_exception(
                SandboxError(f"the sandbox ({self._isolation.name}) did not start: {said[-500:]}")
            )

    def _heard_output(self, pipe: _Pipe) -> None:
        if pipe.is_over and not self._stopped.done():
            self._stopped.set_result(Reason.OUTPUT)

    def _heard_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if not self._gone.done():
            self._gone.set_result(None)
        if not self._stopped.done():
            self._stopped.set_result(None)


def _processes_of(user: int) -> list[int]:
    """Living processes that run as `user`, including those that hide their owner."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            status = (path / "status").read_bytes()
            state = status.partition(b"\nState:\t")[2][:1]
            users = status.partition(b"\nUid:\t")[2].partition(b"\n")[0].split()
            if str(user).encode() in users and state not in (b"Z", b"X"):
                found.append(int(path.name))
    return found


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(folder)
    except OSError:
        return False

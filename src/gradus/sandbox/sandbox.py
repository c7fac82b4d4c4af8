"""The sandbox: runs programs of a model, a few at once, each in a box of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

from gradus.errors import ConfigError
from gradus.sandbox.box import MARK, RunningBox
from gradus.sandbox.program import Ended, Limits, Reason, UntrustedProgram, reason_of
from gradus.sandbox.ways import Protection, Way, claimed_user, strongest_way

_PATH = "/usr/local/bin:/usr/bin:/bin"
_REMOVE_SECONDS = 60.0


class Sandbox:
    """Runs programs, at most `max_running` at once, each in a fresh process.

    `require` names protections without which it refuses to exist. However a program ends, `run`
    returns; `SandboxError` means that the box itself could not be made.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        max_running: int | None = None,
        require: Iterable[Protection | str] = (),
        way: Way | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.way = way or strongest_way()
        self._max_running = max_running or max(2, os.cpu_count() or 2)
        # A semaphore belongs to one event loop.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = weakref.WeakKeyDictionary()
        self._endings: set[asyncio.Task[None]] = set()
        if missing := sorted({str(name) for name in require} - set(self.way.held)):
            raise ConfigError(
                f"programs of a model would run without the protections {missing}: this machine "
                f"offers {self.way.name!r}. Install bubblewrap, allow user namespaces, use a "
                "container, or require less"
            )

    async def run(self, program: UntrustedProgram, limits: Limits | None = None) -> Ended:
        """Run one program to its end, or to the limit that it meets first."""
        bounds = limits or self.limits
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._max_running))
        async with slots:
            with claimed_user(self.way) as user:
                async with _folder(self.way, user) as folder:
                    return await self._run_in(folder, user, program, bounds)

    async def _run_in(
        self, folder: Path, user: int | None, program: UntrustedProgram, limits: Limits
    ) -> Ended:
        began = time.monotonic()
        mark = secrets.token_hex(8)
        order = self._order(folder, user, program, limits, mark)
        box = RunningBox(self.way, user, folder, limits)
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
        held = self.way.held
        return Ended(reason, code, box.stdout.text(), stderr, seconds, self.way.name, held)

    async def _end(self, box: RunningBox, mark: str) -> None:
        """End all of a box, also when the one who waits is cancelled again."""
        ending = asyncio.create_task(box.end(mark))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)

    def _order(
        self, folder: Path, user: int | None, program: UntrustedProgram, limits: Limits, mark: str
    ) -> bytes:
        """What the launcher reads."""
        home = self.way.folder(folder)
        own = {"PATH": _PATH, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", MARK: mark}
        bounds = {
            name: value
            for name, value in dataclasses.asdict(limits).items()
            if isinstance(value, int)
        }
        first, *rest = program.command
        words = [self.way.python if first == "python" else first, *rest]
        sections: dict[str, Mapping[str, object]] = {
            "word": {str(place): word for place, word in enumerate(words)},
            "file": program.files,
            "variable": own | dict(program.variables),
            "limit": bounds | {"processes": self.way.processes(limits, user)},
            "init": {"": ""} if self.way.kind == "unshare" else {},
        }
        return b"".join(
            _entry(kind, name, str(value))
            for kind, entries in sections.items()
            for name, value in entries.items()
        )


def _entry(kind: str, name: str, value: str) -> bytes:
    """As the launcher reads it; half characters travel as the three bytes that they would be."""
    name_bytes, value_bytes = name.encode(), value.encode("utf-8", "surrogatepass")
    return f"{kind} {len(name_bytes)} {len(value_bytes)}\n".encode() + name_bytes + value_bytes


@contextlib.asynccontextmanager
async def _folder(way: Way, user: int | None) -> AsyncIterator[Path]:
    """A folder of the program's own; the one that bwrap makes in memory needs none."""
    if way.kind == "bwrap":
        yield Path("/")
        return
    folder = Path(tempfile.mkdtemp(prefix="gradus-box-"))
    try:
        if user is not None:
            os.chown(folder, user, user)
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(_remove, folder))


def _remove(folder: Path) -> None:
    """Remove a folder that may be deeper than Python's own removal can go."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        words = ["sh", "-c", 'chmod -R u+rwx "$1"; rm -rf "$1"', "sh", str(folder)]
        subprocess.run(words, capture_output=True, timeout=_REMOVE_SECONDS, check=False)

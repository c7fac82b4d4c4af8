"""A program that runs: where, with which files, and what is kept of what it says.

On this machine it runs below a guardian, which ends whatever it leaves behind; in a container it is
attached through the container's engine, and the container ends with the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from gradus.processes.table import carries_mark, living_processes, signal_process
from gradus.run.ready import wait_for_exit

END_SECONDS = 10.0
"""How long a program that was told to end, and its output, are waited for."""
CLOSE_SECONDS = 1.0
"""How long the pipes of a program that has ended may stay open."""
_GUARDIAN = str(Path(__file__).with_name("guardian.py"))
_NOT_COPIED = shutil.ignore_patterns("__pycache__", ".git", ".venv")
_CHUNK_BYTES = 65_536
_CONTAINER_HOME = "/tmp/gradus-home"
_CONTAINER_STDIN = "/tmp/gradus-task"


class Tail:
    """The end of a stream, at most `max_bytes` of it.

    >>> tail = Tail(3)
    >>> tail.add(b"abcde")
    >>> tail.text
    'cde'
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self.num_bytes = 0
        """Of the whole stream."""

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self.num_bytes += len(chunk)
        self._kept += chunk
        if len(self._kept) > 2 * self._max_bytes:
            del self._kept[: -self._max_bytes]

    @property
    def text(self) -> str:
        """Decode what is kept; bytes that are not UTF-8 become U+FFFD."""
        return bytes(self._kept[-self._max_bytes :]).decode(errors="replace")


@dataclass
class Run:
    """A program that was started; `exit_code` is None until it has ended."""

    output: Tail
    errors: Tail
    exit_code: int | None = None

    @classmethod
    def of(cls, max_bytes: int) -> Run:
        return cls(Tail(max_bytes), Tail(max_bytes))


@dataclass(frozen=True)
class Start:
    """A command with everything that it needs."""

    command: list[str]
    env: dict[str, str]
    files: list[Path]
    task: bytes
    task_file: str | None
    """None puts the task on standard input."""


class Place(Protocol):
    """Where a program runs."""

    home: str
    """Its own folder for everything that is not a result."""
    is_contained: bool
    """True if it has its own file system."""

    async def run(self, start: Start, run: Run) -> None:
        """Copy the files and run the command to its end; `run` is filled as it continues.

        Cancelled, it ends the program and everything that it started.
        """


@asynccontextmanager
async def place_for(runtime: vf.Runtime) -> AsyncIterator[Place]:
    """The place that a runtime offers; what it holds of its own is removed at the end."""
    if not isinstance(runtime, SubprocessRuntime):
        yield ContainerPlace(runtime)
        return
    home = tempfile.mkdtemp(prefix="program-")
    try:
        yield LocalPlace(local_folder(runtime), home)
    finally:
        await asyncio.to_thread(remove, Path(home))


def local_folder(runtime: SubprocessRuntime) -> Path:
    """The working folder of a runtime on this machine."""
    if runtime.workdir is None:
        raise SandboxError("the runtime has not been started")
    folder: Path = runtime.workdir
    return folder


class LocalPlace:
    """A folder of this machine."""

    is_contained = False

    def __init__(self, folder: Path, home: str) -> None:
        self._folder = folder
        self.home = home

    async def run(self, start: Start, run: Run) -> None:
        """Run below a guardian."""
        await asyncio.to_thread(self._prepare, start)
        stdin = Path(self.home, "stdin") if start.task_file is None else Path(os.devnull)
        control, our_end = os.pipe()
        try:
            with stdin.open("rb") as file:
                guardian = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", _GUARDIAN, str(control), *start.command),
                    env=start.env,
                    cwd=self._folder,
                    stdin=file,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(control,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(our_end)
            raise
        finally:
            os.close(control)
        try:
            run.exit_code = await self._attend(guardian, run)
        finally:
            os.close(our_end)
            await _settled(self._end(guardian, END_SECONDS))

    def _prepare(self, start: Start) -> None:
        for file in start.files:
            if file.is_dir():
                shutil.copytree(file, self._folder / file.name, ignore=_NOT_COPIED)
            else:
                shutil.copy2(file, self._folder / file.name)
        if start.task_file is None:
            target = Path(self.home, "stdin")
        else:
            target = self._folder / start.task_file
            target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(start.task)

    async def _attend(self, guardian: asyncio.subprocess.Process, run: Run) -> int:
        assert guardian.stdout is not None
        assert guardian.stderr is not None
        async with _listening(_chunks(guardian.stdout), _chunks(guardian.stderr), run):
            await wait_for_exit(guardian.pid)
            await self._end(guardian, CLOSE_SECONDS)
        exit_code = -signal.SIGKILL if guardian.returncode is None else guardian.returncode
        return exit_code if exit_code >= 0 else 128 - exit_code

    async def _end(self, guardian: asyncio.subprocess.Process, seconds: float) -> None:
        """Wait until the guardian is gone and its pipes are closed, which asyncio waits for too.

        A program may have killed its guardian; then what it left is found by its home. Where the
        guardian's end is known before, asyncio waits for no pipe.
        """
        try:
            async with asyncio.timeout(seconds):
                was_killed = await guardian.wait() < 0
        except TimeoutError:
            was_killed = True
        if was_killed:
            with contextlib.suppress(ProcessLookupError):
                guardian.kill()
            self._kill_marked()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await guardian.wait()

    def _kill_marked(self) -> None:
        """Kill every process whose home is this place's, which no other episode has."""
        for entry in living_processes():
            if carries_mark(entry.pid, "HOME", self.home):
                signal_process(entry.pid, signal.SIGKILL)


async def read_output(runtime: vf.Runtime, name: str, max_bytes: int) -> bytes | None:
    """A regular file of the working folder; None when there is none, or a larger one."""
    if isinstance(runtime, SubprocessRuntime):
        return await asyncio.to_thread(_read_regular, local_folder(runtime), name, max_bytes)
    test = await runtime.run(["test", "-f", name], {})
    if test.exit_code != 0:
        return None
    try:
        data: bytes = await runtime.read(name, max_bytes)
    except SandboxError:
        return None
    return data


def _read_regular(folder: Path, name: str, max_bytes: int) -> bytes | None:
    """No link leads out of the folder, and no pipe is waited for."""
    target = (folder / name).resolve()
    if not target.is_relative_to(folder.resolve()):
        return None
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(max_bytes)


class ContainerPlace:
    """A container, or anything else that verifiers' runtimes reach through a command line."""

    is_contained = True
    home = _CONTAINER_HOME

    def __init__(self, runtime: vf.Runtime) -> None:
        self._runtime = runtime

    async def run(self, start: Start, run: Run) -> None:
        """Run attached; a deadline kills its process group, the container's end the rest."""
        await self._prepare(start)
        command = start.command
        if start.task_file is None:
            script = f'exec "$@" < {shlex.quote(_CONTAINER_STDIN)}'
            command = ["sh", "-c", script, "program", *command]
        process = await self._runtime.open_process(command, start.env)
        try:
            async with _listening(process.stdout, process.stderr, run):
                exit_code = await process.wait()
        except BaseException:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await process.kill()
            raise
        if exit_code != 0 and not await self._runtime.alive():
            raise SandboxError(f"the container died under the program (exit {exit_code})")
        run.exit_code = exit_code

    async def _prepare(self, start: Start) -> None:
        executable = []
        for file, target in _with_targets(start.files):
            await self._runtime.write(target, await asyncio.to_thread(file.read_bytes))
            if os.access(file, os.X_OK):
                executable.append(target)
        await self._runtime.write(start.task_file or _CONTAINER_STDIN, start.task)
        made = await self._runtime.run(["mkdir", "-p", _CONTAINER_HOME], {})
        if executable:
            made = await self._runtime.run(["chmod", "+x", *executable], {})
        if made.exit_code != 0:
            raise SandboxError(f"the container cannot be prepared: {made.stderr.strip()[-500:]}")


def _with_targets(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Every file to copy, folders opened, with its path in the working folder."""
    for file in files:
        if not file.is_dir():
            yield file, file.name
            continue
        for parent, folders, names in os.walk(file):
            skipped = _NOT_COPIED(parent, folders)
            folders[:] = sorted(set(folders) - skipped)
            for name in sorted(names):
                path = Path(parent, name)
                yield path, str(Path(file.name) / path.relative_to(file))


async def _chunks(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await stream.read(_CHUNK_BYTES):
        yield chunk


async def _keep(chunks: AsyncIterable[bytes], tail: Tail) -> None:
    async for chunk in chunks:
        tail.add(chunk)


@asynccontextmanager
async def _listening(
    output: AsyncIterable[bytes], errors: AsyncIterable[bytes], run: Run
) -> AsyncIterator[None]:
    """Keep the ends of both streams; after the block, whatever was still on its way."""
    readers = [
        asyncio.create_task(_keep(output, run.output)),
        asyncio.create_task(_keep(errors, run.errors)),
    ]
    try:
        yield
        await asyncio.wait(readers, timeout=END_SECONDS)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _settled(ending: Coroutine[Any, Any, None]) -> None:
    """Finish a coroutine even when this task is cancelled meanwhile."""
    task = asyncio.create_task(ending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def remove(folder: Path) -> None:
    """Remove a folder, also where a program took the right to do so away."""
    open_up(folder)
    shutil.rmtree(folder, ignore_errors=True)


def open_up(folder: Path) -> None:
    """Give back the right to change folders that a program made."""
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, stat.S_IRWXU)

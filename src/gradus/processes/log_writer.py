"""The logs of a launch: a thread reads what the children say and files it.

Each child's stdout and stderr are one pipe. The thread files the records of `gradus.log`, which
carry a mark, and makes lines of level OUTPUT of everything else.

Whoever holds the lock of a pipe reads it: the launcher, and after its death the processes that
write to the pipe, one after the other (`take_over`). They get a descriptor that can both write and
read, so the pipe is never without a reader and a write never meets a broken pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from gradus.log import LOG_VARIABLE, OUTPUT, LogSettings, get_logger, printable, render, stamp
from gradus.redact import SecretFilter

LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
PIPE_BYTES = 1 << 20
"""Asked of the kernel for each pipe: what a child can say while nothing reads."""
SYNC_SECONDS = 5.0
"""How long `sync` waits until what a dead child said stands in its log."""
CLOSE_SECONDS = 10.0
"""How long `close` waits for programs that still hold a pipe."""
MAX_LINE_BYTES = 64 << 10
"""Longer lines of a program are cut in pieces of this size."""

_READ_BYTES = 1 << 16
_IDLE_SECONDS = 1.0
_RECORD = "\x1e"
_STDERR = 2
_LOG = get_logger(__name__)


class LogWriter:
    """Owns the reading end of every pipe, the files, and the thread that alone touches them."""

    def __init__(self, settings: LogSettings) -> None:
        mark = settings.mark or f"{_RECORD}{secrets.token_hex(8)} "
        self._settings = replace(settings, mark=mark)
        self._streams: dict[int, _Stream] = {}
        self._files: dict[str, _LogFile] = {}
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._leave_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    @classmethod
    def take_over(cls) -> Callable[[], None]:
        """File what this process says, and those that share its pipe, once the launcher is gone.

        One of them reads the pipe; the next one when that has ended. Returns at once; call the
        function that comes back before the process ends, so that its last words are filed. It does
        nothing where stderr is not the pipe of a launcher.
        """
        told = LogSettings.current()
        try:
            if os.fstat(_STDERR).st_ino != told.pipe:
                return lambda: None
            pipe = os.open(f"/proc/self/fd/{_STDERR}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # stderr is closed
            return lambda: None
        logs = cls(told)
        is_reading = threading.Event()

        def wait_for_turn() -> None:
            fcntl.flock(pipe, fcntl.LOCK_EX)
            logs._add(pipe, told, SecretFilter(os.environ))
            is_reading.set()

        logs._ask(wait_for_turn)
        return lambda: logs.sync() if is_reading.is_set() else None

    def open(
        self, log: Path, process: str, variables: Mapping[str, str]
    ) -> tuple[int, dict[str, str]]:
        """A descriptor for a child's stdout and stderr, to be closed once the child has it, and the
        variables that tell the child of its log. Secrets of the child's `variables` are left out of
        what is filed."""
        # So that a folder which cannot be written is refused here, as for any other file.
        os.close(os.open(log, LOG_FLAGS, 0o600))
        read_end, write_end = os.pipe()
        try:
            output = os.open(f"/proc/self/fd/{write_end}", os.O_RDWR)
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        fcntl.flock(read_end, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # the user's share of large pipes may be used up
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        inode = os.fstat(read_end).st_ino
        told = replace(self._settings, log=str(log.absolute()), process=process, pipe=inode)
        self._ask(partial(self._add, read_end, told, SecretFilter(variables)))
        return output, {LOG_VARIABLE: told.as_text()}

    def sync(self) -> None:
        """Return when what was said until now stands in the logs, or SYNC_SECONDS are over."""
        done = threading.Event()
        self._ask(self._drain_all)
        self._ask(done.set)
        done.wait(SYNC_SECONDS)

    def close(self) -> None:
        """Return when no program holds a pipe any more, or CLOSE_SECONDS are over."""
        self._ask(self._leave_soon)
        self._thread.join(CLOSE_SECONDS + SYNC_SECONDS)

    def _ask(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Read until nothing is left to come."""
        while self._leave_at is None or (self._streams and time.monotonic() < self._leave_at):
            try:
                self._read_ready()
            except Exception:  # the children of a launcher that reads no more would block
                _LOG.exception("some lines of the logs are lost")
        self._drain_all()
        for descriptor in list(self._streams):
            self._forget(descriptor)
        for file in self._files.values():
            file.close()
        os.close(self._wake)

    def _read_ready(self) -> None:
        ready = self._poll.poll(_IDLE_SECONDS * 1000)
        for descriptor, _ in ready:
            if descriptor in self._streams:
                self._read(descriptor)
            elif descriptor == self._wake:
                os.eventfd_read(self._wake)
                while not self._tasks.empty():
                    self._tasks.get()()
        if not ready:
            for stream in self._streams.values():
                stream.flush()

    def _add(self, read_end: int, told: LogSettings, hide: SecretFilter) -> None:
        file = self._files.setdefault(told.log, _LogFile(told))
        self._streams[read_end] = _Stream(told, file, hide)
        self._poll.register(read_end, select.POLLIN | select.POLLHUP)

    def _leave_soon(self) -> None:
        self._leave_at = time.monotonic() + CLOSE_SECONDS

    def _drain_all(self) -> None:
        """Read what the pipes hold now, and no more: a program may never stop talking."""
        for descriptor, stream in list(self._streams.items()):
            left = PIPE_BYTES
            while left > 0 and (read := self._read(descriptor)):
                left -= read
            stream.flush()

    def _read(self, descriptor: int) -> int:
        """File a piece of what a program says, and return its bytes; forgets a pipe at its end."""
        try:
            piece = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if piece:
            self._streams[descriptor].feed(piece)
            return len(piece)
        self._forget(descriptor)
        return 0

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._streams.pop(descriptor).end()
        os.close(descriptor)


class _Stream:
    """Makes lines of what one child says."""

    def __init__(self, settings: LogSettings, file: _LogFile, hide: SecretFilter) -> None:
        self._settings = settings
        self._hide = hide
        self._mark = settings.mark.encode()
        self._file = file
        self._begun = b""

    def feed(self, piece: bytes) -> None:
        """Write the lines that are complete."""
        said, end, self._begun = (self._begun + piece).rpartition(b"\n")
        if len(self._begun) > 2 * PIPE_BYTES:
            said, self._begun = said + end + self._begun, b""
        self._file.write(list(self._lines(self._hide(said))))

    def flush(self) -> None:
        """Write what was said without the end of a line, unless a record begins in it: the rest of
        that follows when the pipe has room."""
        if self._mark not in self._begun:
            self.end()

    def end(self) -> None:
        said, self._begun = self._begun, b""
        if said:
            self._file.write(list(self._lines(self._hide(said))))

    def _lines(self, said: bytes) -> Iterator[bytes]:
        """The lines of the file; records may stand behind the beginning of another line."""
        output, *marked = said.split(self._mark)
        yield from _outputs(output, self._settings)
        for text in marked:
            record, _, output = text.partition(b"\n")
            yield f"{printable(record.decode(errors='backslashreplace'))}\n".encode()
            yield from _outputs(output, self._settings)


class _LogFile:
    """One log; a disk that is full costs lines, which are counted."""

    def __init__(self, settings: LogSettings) -> None:
        self._path = settings.log
        self._settings = settings
        self._descriptor = -1
        self._num_lost = 0
        self._is_torn = False

    def write(self, lines: list[bytes]) -> None:
        self._open()
        text = b"".join(lines)
        if self._num_lost:
            text = self._note_of_loss() + text
        try:
            while text:
                text = text[os.write(self._descriptor, text) :]
                self._is_torn = bool(text)
            self._num_lost = 0
        except OSError:
            self._num_lost += len(lines)

    def _note_of_loss(self) -> bytes:
        """What stands where lines are missing; it ends a line that was cut."""
        words = f"{self._num_lost} lines could not be written here".encode()
        (line,) = _outputs(words, self._settings)
        return b"\n" + line if self._is_torn else line

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self._path, LOG_FLAGS, 0o600)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _outputs(output: bytes, settings: LogSettings) -> Iterator[bytes]:
    """The lines of the file for text that no logger wrote."""
    values = {"time": stamp(time.time()), "level": OUTPUT, "run": settings.run}
    values |= {"process": settings.process, "message": ""}
    head = "" if settings.format == "json" else render(values, "text")
    for line in output.splitlines():
        for start in range(0, len(line), MAX_LINE_BYTES):
            text = line[start : start + MAX_LINE_BYTES].decode(errors="backslashreplace")
            made = head + printable(text) if head else render(values | {"message": text}, "json")
            yield f"{made}\n".encode()

"""The process that writes the logs of a launch, so that they rotate and no line of them is lost.

Each child's stdout and stderr are one pipe. Its reader is a process of its own, which outlives a
launcher that was killed and so still files the last words of the children. It turns records of
`gradus.log` into lines of the chosen format and everything else into lines of level OUTPUT, and
renames a file that is full: no child holds the file, so none has to know.

The launcher keeps the reading ends too. A writer that was killed is replaced within a moment, and
meanwhile the pipes keep what the children say.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradus.log import LOG_VARIABLE, OUTPUT, LogSettings, as_json, as_text, stamp

PIPE_BYTES = 1 << 20
"""Asked of the kernel for each pipe. Below it writes of several processes do not mix."""
SYNC_SECONDS = 2.0
"""How long the launcher waits until what a dead child said stands in its log."""
CLOSE_SECONDS = 10.0
"""How long the launcher waits at the end until the writer has written all that was said."""
LEAVE_SECONDS = 30.0
"""How long a writer without launcher waits for programs that hold a pipe."""
RESTART_SECONDS = 1.0
"""Between two starts of a writer, should none of them live."""
MAX_LINE_BYTES = 64 << 10
"""Longer lines of a program are cut in pieces of this size."""

_READ_BYTES = 1 << 18
_IDLE_SECONDS = 1.0
_MESSAGE_BYTES = 1 << 16
_RECORD = b"\x1e"
_ROOT = Path(__file__).parents[2]
_START = (
    "import sys; sys.path.append(sys.argv[1]); from gradus.processes.log_writer import main; main()"
)
"""Isolated, so that nothing in the working directory or in a variable can be imported instead."""


@dataclass(frozen=True)
class _Pipe:
    """What one child says, and where it goes."""

    read_end: int
    log: Path
    process: str


class LogWriter:
    """The launcher's side: owns the writing process and a reading end of every pipe.

    >>> logs = LogWriter(LogSettings(run="demo"))  # doctest: +SKIP
    >>> stdout = logs.open(Path("logs/trainer.log"), "trainer")  # doctest: +SKIP
    """

    def __init__(self, settings: LogSettings) -> None:
        mark = f"{_RECORD.decode()}{secrets.token_hex(8)} "
        self._settings = replace(settings, mark=mark)
        self._pipes: list[_Pipe] = []
        self._num_asked = 0
        self._start()

    @property
    def pid(self) -> int:
        """The process that writes."""
        return self._process.pid

    def variables(self) -> dict[str, str]:
        """What a child must be told."""
        return {LOG_VARIABLE: self._settings.as_text()}

    def open(self, log: Path, process: str) -> int:
        """A descriptor for a child's stdout and stderr, to be closed once the child has it."""
        # So that a folder which cannot be written is refused here, as for any other file.
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        read_end, write_end = os.pipe()
        with contextlib.suppress(OSError):  # the user's share of large pipes may be used up
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        pipe = _Pipe(read_end, log.absolute(), process)
        for old in [old for old in self._pipes if old.log == pipe.log]:
            os.close(old.read_end)
            self._pipes.remove(old)
        self._pipes.append(pipe)
        self._send(pipe)
        return write_end

    def look(self) -> None:
        """Replace a writer that has ended, once a second at most."""
        if self._process.poll() is None or time.monotonic() - self._started_at < RESTART_SECONDS:
            return
        self._control.close()
        self._start()
        for pipe in self._pipes:
            self._send(pipe)

    def sync(self) -> None:
        """Return when what was said until now stands in the logs, or SYNC_SECONDS are over."""
        self.look()
        self._num_asked += 1
        question = str(self._num_asked).encode()
        self._control.settimeout(SYNC_SECONDS)
        with contextlib.suppress(OSError):
            self._control.send(question)
            while (answer := self._control.recv(_MESSAGE_BYTES)) and answer != question:
                continue

    def close(self) -> None:
        """Let the writer end once no program holds a pipe any more; kill it when that lasts."""
        self.look()
        self._control.close()
        for pipe in self._pipes:
            os.close(pipe.read_end)
        self._pipes.clear()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", _START, str(_ROOT)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self._control = ours
        with contextlib.suppress(OSError):  # a writer that ended at once, which `look` will see
            ours.send(self._settings.as_text().encode())

    def _send(self, pipe: _Pipe) -> None:
        told = json.dumps({"log": str(pipe.log), "process": pipe.process}).encode()
        with contextlib.suppress(OSError):  # a writer that just ended; `look` sends it again
            socket.send_fds(self._control, [told], [pipe.read_end])


def main() -> None:
    """Write logs until the launcher and every program that holds a pipe are gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    settings = LogSettings(**json.loads(control.recv(_MESSAGE_BYTES)))
    _Writing(control, settings).run()


class _Writing:
    """The writer's side: owns the pipes, by descriptor, and the files, by path."""

    def __init__(self, control: socket.socket, settings: LogSettings) -> None:
        self._control = control
        self._settings = settings
        self._streams: dict[int, _Stream] = {}
        self._files: dict[str, _LogFile] = {}
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN | select.POLLHUP)
        self._leave_at: float | None = None

    def run(self) -> None:
        """Read until nothing is left to come."""
        while self._leave_at is None or (self._streams and time.monotonic() < self._leave_at):
            ready = self._poll.poll(_IDLE_SECONDS * 1000)
            for descriptor, _ in ready:
                if descriptor in self._streams:
                    self._read(descriptor)
                elif descriptor == self._control.fileno():
                    self._obey()
            if not ready:
                for stream in self._streams.values():
                    stream.flush()

    def _obey(self) -> None:
        """Take a pipe, or say that everything was written; no message means no launcher."""
        try:
            message, descriptors, *_ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._poll.unregister(self._control.fileno())
            self._leave_at = time.monotonic() + LEAVE_SECONDS
        elif descriptors:
            told = json.loads(message)
            path, descriptor = told["log"], descriptors[0]
            if path not in self._files:
                self._files[path] = _LogFile(path, self._settings)
            stream = _Stream(told["process"], self._settings, self._files[path])
            self._streams[descriptor] = stream
            self._poll.register(descriptor, select.POLLIN | select.POLLHUP)
        else:
            for descriptor in list(self._streams):
                self._drain(descriptor)
            with contextlib.suppress(OSError):
                self._control.send(message)

    def _drain(self, descriptor: int) -> None:
        """Read what a pipe holds now, and no more: its program may never stop talking."""
        left = _waiting_bytes(descriptor)
        while left > 0 and descriptor in self._streams:
            left -= self._read(descriptor)
        if descriptor in self._streams:
            self._streams[descriptor].flush()

    def _read(self, descriptor: int) -> int:
        """One piece of what a program says; forgets the pipe at its end."""
        piece = os.read(descriptor, _READ_BYTES)
        if piece:
            self._streams[descriptor].feed(piece)
            return len(piece)
        self._poll.unregister(descriptor)
        self._streams.pop(descriptor).end()
        os.close(descriptor)
        return 0


class _Stream:
    """Makes lines of what one child says."""

    def __init__(self, process: str, settings: LogSettings, file: _LogFile) -> None:
        self._process = process
        self._settings = settings
        self._mark = settings.mark.encode()
        self._file = file
        self._begun = b""

    def feed(self, piece: bytes) -> None:
        """Write the lines that are complete."""
        *lines, self._begun = (self._begun + piece).split(b"\n")
        if len(self._begun) > 2 * PIPE_BYTES:
            lines.append(self._begun)
            self._begun = b""
        self._file.write([made for line in lines for made in self._lines(line)])

    def flush(self) -> None:
        """Write what was said without the end of a line, unless a record begins in it: the rest of
        that comes when the pipe has room, or its process goes on."""
        if self._mark not in self._begun:
            self.end()

    def end(self) -> None:
        """Write what is left."""
        begun, self._begun = self._begun, b""
        if begun:
            self._file.write(list(self._lines(begun)))

    def _lines(self, line: bytes) -> Iterator[bytes]:
        """The lines of the file for one of the pipe: records may stand behind a begun line."""
        output, *records = line.split(self._mark)
        yield from self._outputs(output)
        for record in records:
            try:
                values = json.loads(record)
                yield _rendered(values, self._settings)
            # Its process ended while it wrote, or was none of ours and made up a record: that may
            # be any JSON, and a writer that fell over it would cost the lines of all.
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                yield from self._outputs(record)

    def _outputs(self, output: bytes) -> Iterator[bytes]:
        for text in output.splitlines():
            for start in range(0, len(text), MAX_LINE_BYTES):
                piece = text[start : start + MAX_LINE_BYTES].decode(errors="backslashreplace")
                yield _output(piece, self._process, self._settings)


class _LogFile:
    """One log with its full files; a disk that is full costs lines, which are counted."""

    def __init__(self, path: str, settings: LogSettings) -> None:
        self._path = path
        self._settings = settings
        self._descriptor = -1
        self._size = 0
        self._num_lost = 0
        self._is_torn = False

    def write(self, lines: list[bytes]) -> None:
        """Append lines, and begin a new file before one that has no room."""
        self._open()
        if self._size + sum(map(len, lines)) <= self._settings.max_bytes:
            self._append(b"".join(lines), len(lines))
            return
        for line in lines:
            if self._size and self._size + len(line) > self._settings.max_bytes:
                self._rotate()
                self._open()
            self._append(line, 1)

    def _append(self, text: bytes, num_lines: int) -> None:
        if self._num_lost:
            text = self._confession() + text
        try:
            while text:
                written = os.write(self._descriptor, text)
                self._size += written
                text = text[written:]
                self._is_torn = bool(text)
            self._num_lost = 0
        except OSError:
            self._num_lost += num_lines

    def _confession(self) -> bytes:
        """What stands where lines are missing; it ends a line that was cut."""
        line = _output(f"{self._num_lost} lines could not be written here", "", self._settings)
        return b"\n" + line if self._is_torn else line

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with contextlib.suppress(OSError):
            self._descriptor = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._descriptor).st_size

    def _rotate(self) -> None:
        """Rename the full file and its elders; the oldest goes."""
        with contextlib.suppress(OSError):
            for number in range(self._settings.keep - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
            os.replace(self._path, f"{self._path}.1")
        os.close(self._descriptor)
        self._descriptor, self._size = -1, 0


def _output(text: str, process: str, settings: LogSettings) -> bytes:
    """A line that no logger wrote."""
    values = {"time": stamp(time.time()), "level": OUTPUT, "run": settings.run}
    return _rendered({**values, "process": process, "message": text}, settings)


def _rendered(values: Mapping[str, Any], settings: LogSettings) -> bytes:
    text = as_text(values) if settings.format == "text" else as_json(values)
    return f"{text}\n".encode(errors="backslashreplace")


def _waiting_bytes(descriptor: int) -> int:
    found = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]

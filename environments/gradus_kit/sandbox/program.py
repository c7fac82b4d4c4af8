"""A program for the sandbox, its limits, and how it ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MIB = 1 << 20
_LAST_LINES = (
    ("MemoryError", "memory"),
    ("BlockingIOError: [Errno 11]", "processes"),
    ("RuntimeError: can't start new thread", "processes"),
    ("OSError: [Errno 27]", "file size"),
    ("OSError: [Errno 28]", "file size"),
    ("OSError: [Errno 24]", "open files"),
)
"""How the last line of a Python program begins that one of the limits ended."""


@dataclass(frozen=True)
class Limits:
    """How much one program may use."""

    seconds: float = 10.0
    """Wall-clock time; then everything that it started is killed."""
    cpu_seconds: int = 10
    """Processor time of each process."""
    memory_bytes: int = 512 * MIB
    """Address space of each process."""
    processes: int = 16
    """Processes and threads at once, the program's first one included."""
    file_bytes: int = 16 * MIB
    """Size of one file."""
    disk_bytes: int = 64 * MIB
    """All files together."""
    open_files: int = 64
    """Descriptors of each process."""
    output_bytes: int = 1 * MIB
    """Standard output and standard error, each; one byte more ends the program."""


@dataclass(frozen=True)
class UntrustedProgram:
    """A command, the files that it finds in its folder, its input and its variables."""

    command: tuple[str, ...]
    """`python` as the first word is the box's own interpreter."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text by relative path."""
    stdin: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Beside PATH, HOME, TMPDIR and LANG; nothing of ours is inherited."""


def python_program(source: str, *, stdin: str = "", **files: str) -> UntrustedProgram:
    """One file of Python, without site packages."""
    return UntrustedProgram(("python", "-I", "main.py"), {**files, "main.py": source}, stdin)


class Reason(StrEnum):
    """How a program ended."""

    EXITED = "exited"
    """By itself; the exit code says the rest."""
    DEADLINE = "deadline"
    CPU = "cpu time"
    MEMORY = "memory"
    PROCESSES = "processes"
    FILE_SIZE = "file size"
    OPEN_FILES = "open files"
    OUTPUT = "output"
    """It wrote more than it may."""
    SIGNAL = "signal"


@dataclass(frozen=True)
class Ended:
    """A program that ran, and what is left of it: text."""

    reason: Reason
    exit_code: int | None
    """None after a signal, which `reason` then names, or a limit."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def succeeded(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.reason is Reason.EXITED and self.exit_code == 0

    def info(self) -> dict[str, Any]:
        """For the episode's info."""
        return {
            "reason": str(self.reason),
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
        }


def reason_of(status: int, stderr: str) -> tuple[Reason, int | None]:
    """The reason and exit code in a return code of `subprocess` or, above 128, of a shell.

    Which limit ended a Python program stands in the last line that it wrote. A program can write
    such a line itself; nothing but the name of its failure comes from it.
    """
    number = -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return Reason.CPU, None
    if number == signal.SIGXFSZ:
        return Reason.FILE_SIZE, None
    if status < 0 or number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM):
        return Reason.SIGNAL, None
    if status != 0:
        last = stderr.rstrip().rsplit("\n", 1)[-1]
        for beginning, name in _LAST_LINES:
            if last.startswith(beginning):
                return Reason(name), status
    return Reason.EXITED, status

"""What a process of a run does for itself: end with its launcher, and collect garbage rarely."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from gradus.errors import ExitCode
from gradus.log import get_logger
from gradus.processes.log_writer import LogWriter
from gradus.processes.table import (
    ProcessEntry,
    descendants,
    is_alive,
    living_processes,
    read_process,
    signal_process,
)

DEATH_PIPE_VARIABLE = "GRADUS_DEATH_PIPE"
"""`<fd>` or `<fd>:<inode>` of a pipe that is at its end when the launcher is gone."""

LAUNCH_VARIABLE = "GRADUS_LAUNCH"
"""`<pid>.<start time>` of the launcher; every descendant inherits it."""

GRACE_SECONDS = 5.0
"""Time to end after the launcher's death before everything below this process is killed."""

COLLECT_AFTER_ALLOCATIONS = (1_000, 5, 5_000)
"""Allocations that were not freed, then collections of the next younger generation.

An episode holds hundreds of tracked objects and leaves few cycles. With the default thresholds a
full collection, over all episodes that wait, stopped the event loop for 0.5 s every few seconds."""

_POLL_SECONDS = 0.05
_KILL_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_LAUNCHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit({int(ExitCode.TRY_AGAIN)})
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{{sys.argv[2]}} cannot be started: {{error.strerror}}")
"""
_LOG = get_logger(__name__)


def watch_death_pipe() -> None:
    """End this process, and all below it, once its launcher or its parent is gone.

    Call it first in every role. A daemon thread waits for the end of the launcher's pipe, and for
    the end of the launcher and of the parent themselves: ranks under torchrun do not inherit the
    pipe. Then this process gets SIGTERM, and after GRACE_SECONDS ends with exit code 75. Without
    a launcher (started by hand) nothing is watched.
    """
    if DEATH_PIPE_VARIABLE not in os.environ:
        return
    found = [_inherited_pipe(), _launcher_descriptor(), _process_descriptor(os.getppid())]
    watched = [descriptor for descriptor in found if descriptor is not None]
    thread = threading.Thread(
        target=_wait_and_end, args=(watched,), name="death-watch", daemon=True
    )
    thread.start()


def end_within(seconds: float) -> None:
    """Give this process longer to end by itself, once its launcher or its parent is gone."""
    _Grace.seconds = seconds


class _Grace:
    seconds: ClassVar[float] = GRACE_SECONDS


def leave_no_core() -> None:
    """Let neither this process nor what it starts leave its memory, with keys in it, on the disk.

    One byte and not zero: the kernel asks a program that takes cores only at one (`core(5)`).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))


def open_many_files() -> None:
    """Let this process hold as many connections as the system lets it: each request is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _inherited_pipe() -> int | None:
    """The launcher's pipe; None when its number belongs to something else in this process."""
    number, _, inode = os.environ[DEATH_PIPE_VARIABLE].partition(":")
    try:
        status = os.fstat(int(number))
    except (ValueError, OSError):
        return None
    if not stat.S_ISFIFO(status.st_mode) or (inode and inode != str(status.st_ino)):
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def _launcher_descriptor() -> int | None:
    pid, _, start_time = os.environ.get(LAUNCH_VARIABLE, "").partition(".")
    if not pid.isdigit():
        return None
    descriptor = _process_descriptor(int(pid))
    entry = read_process(int(pid))
    if entry is None or str(entry.start_time) != start_time:
        return _ended_descriptor()
    return descriptor


def is_launcher_gone() -> bool:
    """Whether the launcher of this process has ended; False when started by hand."""
    pid, _, start_time = os.environ.get(LAUNCH_VARIABLE, "").partition(".")
    return pid.isdigit() and not is_alive(int(pid), int(start_time or 0))


def _process_descriptor(pid: int) -> int | None:
    """Readable once process `pid` is dead; None where the system cannot tell."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return _ended_descriptor()
    except OSError:
        return None


def _ended_descriptor() -> int:
    """A pipe that is at its end already."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def _wait_and_end(watched: list[int]) -> None:
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    poll.poll()
    file_last_words = LogWriter.take_over()
    _LOG.warning("the process that started this one is gone; ending")
    deadline = time.monotonic() + _Grace.seconds
    # A main thread that ends by itself must still end the processes below it, and then file what
    # was said.
    atexit.register(file_last_words)
    atexit.register(end_below, deadline)
    for entry in _below():
        signal_process(entry.pid, signal.SIGTERM)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(max(0.0, deadline - time.monotonic()))
    end_below(deadline)
    file_last_words()
    os._exit(ExitCode.TRY_AGAIN)


def show_stacks() -> None:
    """Let a crash and SIGUSR1 write the stacks of all threads into the log, whatever they do."""
    file = sys.__stderr__ or 2
    faulthandler.enable(file=file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def die_with_parent() -> None:
    """Let the kernel kill this process the moment its parent dies (Linux).

    For processes that run the code of others: what an orphan does next, such as killing its parent
    once more, would hit the launcher. The thread that started this process must be the parent's
    main thread, for it is that thread whose end counts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def dying_with_parent(argv: Sequence[str]) -> list[str]:
    """A command that does what `argv` does, and ends with this process from its first moment.

    A program that asks for the death signal itself outlives a parent that is killed before it
    does. A short interpreter asks first, looks whether this process is still its parent, and
    becomes the program, which keeps the signal, the pid and the descriptors. For it too the end
    of the thread counts that starts it. `argv[0]` is a path.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv]


def end_below(deadline: float) -> None:
    """Wait for the processes below this one, and kill those that are left at the deadline."""
    while (left := _below()) and time.monotonic() < deadline + _KILL_SECONDS:
        if time.monotonic() >= deadline:
            for entry in left:
                signal_process(entry.pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _below() -> list[ProcessEntry]:
    """Living descendants, and the rest of the session when it is ours."""
    own = os.getpid()
    processes = living_processes()
    below = {entry.pid for entry in descendants(own, processes)}
    return [e for e in processes if e.pid != own and (e.pid in below or e.session == own)]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """For imports: they make hundreds of thousands of objects and no garbage.

    Looking for it there took a fifth of a process's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_collector() -> None:
    """Never collect what was imported until now, and collect the rest rarely.

    Call it once, when a process has its parts and before it works.
    """
    # The interpreter's last collection walks every imported module and would take a second.
    atexit.register(gc.freeze)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER_ALLOCATIONS)

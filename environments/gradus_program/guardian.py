"""Runs a program and ends with it and with everything that it left behind.

A separate file that imports nothing of gradus, because it is started for every episode:

    python -I -S guardian.py CONTROL_DESCRIPTOR COMMAND ARGUMENT...

It adopts every process that the program leaves, daemons included. When the program has ended, or
the other end of the control pipe is closed, it kills what lives and exits: with the program's exit
code, 128 + N after signal N, 127 when the program is not found, 126 when it cannot be started.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 5.0
POLL_SECONDS = 0.005


def main(control: int, command: list[str]) -> int:
    """Run `command`; its exit code as a shell would give it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(control, False)
    pid = os.fork()
    if pid == 0:
        start(command)
    return watch(pid, control)


def start(command: list[str]) -> None:
    """Become the program, in its own session so that what it sends to its group stays there.

    Never returns.
    """
    code = 126
    try:
        os.setsid()
        os.closerange(3, 256)
        # Python ignores these two, and a program would inherit that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="replace"))
        if isinstance(error, FileNotFoundError):
            code = 127
    finally:
        os._exit(code)


def watch(pid: int, control: int) -> int:
    """Wait for the program or for the end of the pipe, then kill all that is left."""
    program = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(program, select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    poll.poll()
    status = None
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        try:
            ended, ended_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if ended == pid:
            status = ended_status
        if ended:
            continue
        # Those below a killed process become ours in the next round.
        for child in children():
            kill(child)
        time.sleep(POLL_SECONDS)
    if status is None:
        return 128 + signal.SIGKILL
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def children() -> list[int]:
    """Processes whose parent this one is, by the table of the system."""
    own = str(os.getpid())
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The second field is a name that may hold spaces and parentheses.
                fields = file.read().decode(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == own:
            found.append(int(name))
    return found


def kill(pid: int) -> None:
    """Kill one process; it may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

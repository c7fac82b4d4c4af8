"""The connections of a process, reached from outside: reset at once, or silent for a while.

Linux gives a copy of a descriptor of a child, or of a child's child, to whoever may trace it
(pidfd_getfd(2)); that needs no root. What is done to the copy is done to the one socket behind it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
"""The number of the system call, the same on every architecture."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_ESTABLISHED = "01"
_DROP_ALL = ctypes.create_string_buffer(b"\x06" + bytes(7), 8)
"""A program of the socket filter (BPF) with one instruction: of each packet, keep 0 bytes."""


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("first", ctypes.c_void_p))


def refusal() -> str | None:
    """Why no process gets at the sockets of another here; None where it does."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        try:
            os.close(_copy(child.pid, 0))
        except (OSError, AttributeError) as error:
            return f"a process may not take the descriptors of its children ({error})"
    return None


def cut(pid: int) -> None:
    """Reset every connection of TCP that a process has: both ends are told at once."""
    libc = ctypes.CDLL(None)
    for one in _sockets_of(pid):
        with one, suppress(OSError):  # it is not connected, or no longer
            one.getpeername()
            # An address of no family (AF_UNSPEC) disconnects.
            libc.connect(one.fileno(), bytes(16), 16)


def mute(pid: int) -> None:
    """Let a process hear nothing over TCP: its sockets drop what arrives, calls of new clients and
    acknowledgements of what it says too, and nobody is told."""
    program = bytes(_Program(1, ctypes.addressof(_DROP_ALL)))
    for one in _sockets_of(pid):
        with one, suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def unmute(pid: int) -> None:
    """Let it hear again; what was lost is sent again by the kernel of whoever said it."""
    for one in _sockets_of(pid):
        with one, suppress(OSError):  # nothing was attached
            one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def connections() -> set[str]:
    """What the descriptors of connected sockets of TCP point to, on this machine."""
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # a machine without IPv6
            lines += Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    rows = (line.split() for line in lines)
    return {f"socket:[{row[9]}]" for row in rows if row[3] == _ESTABLISHED}


def is_linked(pid: int, connected: set[str]) -> bool:
    """Whether a process has one of these connections."""
    return any(target in connected for _, target in _descriptors(pid))


def _sockets_of(pid: int) -> Iterator[socket.socket]:
    """A copy of each socket of TCP that a process has; whoever takes one closes it."""
    for number, target in _descriptors(pid):
        if not target.startswith("socket:"):
            continue
        try:
            copied = socket.socket(fileno=_copy(pid, number))
        except OSError:  # it, or its process, was closed meanwhile
            continue
        is_tcp = copied.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and copied.type == socket.SOCK_STREAM:
            yield copied
        else:
            copied.close()


def _descriptors(pid: int) -> list[tuple[int, str]]:
    """Number → what it points to."""
    found = []
    with suppress(OSError):  # the process has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.append((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return found


def _copy(pid: int, number: int) -> int:
    process = os.pidfd_open(pid)
    try:
        copied: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copied
    finally:
        os.close(process)

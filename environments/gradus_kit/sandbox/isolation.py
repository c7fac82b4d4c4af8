"""How programs are isolated: by bubblewrap, which shows them neither files, network nor processes
of ours, and leaves nothing of them. Their own user, where we are root, binds the limit on
processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gradus_kit.sandbox.program import Limits
from gradus_kit.sandbox.room import room

BWRAP = "bwrap"
_OWN_USERS = ((0x60000000, 1 << 20), (50_000, 10_000))
"""First user and number of users; the second range fits into containers that map 65,536 users."""


@dataclass(frozen=True)
class Isolation:
    """How bubblewrap works on this machine."""

    python: str
    """The interpreter that the program finds as `python`."""
    own_user: bool
    """Whether each program runs as a separate user."""

    @property
    def limits_processes(self) -> bool:
        """Whether a fork bomb ends: the kernel never binds that limit for root."""
        return self.own_user or os.geteuid() != 0

    def command(self, limits: Limits) -> list[str]:
        """What stands before the launcher's own command."""
        spaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
        user = ["--hostname", "box", "--uid", "1000", "--gid", "1000"]
        return [BWRAP, *spaces, *user, *room(self.python, limits.disk_bytes), "--"]


@contextlib.contextmanager
def claimed_user(isolation: Isolation) -> Iterator[int | None]:
    """A user that no other program on this machine runs as, or None where none is needed.

    The claim is an abstract socket, which the kernel gives back when we end, however we end.
    """
    if not isolation.own_user:
        yield None
        return
    first, count = _mapped_users()
    # Not the last one again: its dead that wait for init still count for the limit.
    start = secrets.randbelow(count)
    for offset in range(count):
        user = first + (start + offset) % count
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0gradus-sandbox-user-{user}")
        except OSError:
            claim.close()
            continue
        try:
            yield user
        finally:
            claim.close()
        return
    raise RuntimeError("every user of the sandbox is taken")


@cache
def _mapped_users() -> tuple[int, int]:
    """The first of the two ranges that this user namespace maps."""
    rows = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    spans = [(int(row[0]), int(row[0]) + int(row[2])) for row in rows]
    for first, count in _OWN_USERS:
        if any(low <= first and first + count <= high for low, high in spans):
            return first, count
    return _OWN_USERS[-1]


def as_user(user: int | None) -> dict[str, Any]:
    """Arguments of `Popen` for a program that runs as `user`."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}

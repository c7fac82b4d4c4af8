"""How programs are isolated, and which protections each kind gives.

`bwrap` (bubblewrap) and `unshare` (util-linux and our own launcher) show the program the same file
system, without network and other processes; `plain` shows it everything. Its own user, where
we are root, binds the limit on processes, and hides what is not readable for all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from gradus_kit.sandbox.program import Limits
from gradus_kit.sandbox.room import INSIDE, as_bubblewrap, room

_OWN_USERS = ((0x60000000, 1 << 20), (50_000, 10_000))
"""First user and number of users; the second range fits into containers that map 65,536 users."""


class Protection(StrEnum):
    """What only some isolations give. All give an empty environment, a fresh session and the limits
    of `Limits`, except those on `processes` and `disk`."""

    PROCESSES = "processes"
    """The limit on processes binds: a fork bomb ends."""
    NETWORK = "network"
    """No network, not even loopback's listeners."""
    FILES = "files"
    """Files of ours cannot be seen."""
    OTHERS = "others"
    """Other processes can be neither signalled nor read."""
    LEFTOVERS = "leftovers"
    """Nothing outlives the program, neither processes nor files."""
    DISK = "disk"
    """All files together are bounded."""


@dataclass(frozen=True)
class Isolation:
    """One kind of isolation, as it works on this machine."""

    kind: str
    """`bwrap`, `unshare` or `plain`."""
    python: str
    """The interpreter that the program finds as `python`."""
    own_user: bool
    """Whether each program runs as a separate user."""
    base: str = ""
    """Where each program's folder is made; empty where it lies on a memory disk of its own."""

    @property
    def name(self) -> str:
        return f"{self.kind}, own user" if self.own_user else self.kind

    @property
    def has_namespaces(self) -> bool:
        """Whether ending the first process ends all."""
        return self.kind != "plain"

    @property
    def held(self) -> tuple[str, ...]:
        """The protections that hold."""
        # The kernel never binds the limit on processes for root, in whichever namespace.
        bound = self.own_user or os.geteuid() != 0
        kept = {
            Protection.PROCESSES: bound,
            Protection.NETWORK: self.has_namespaces,
            Protection.FILES: self.has_namespaces,
            Protection.OTHERS: self.has_namespaces or self.own_user,
            Protection.LEFTOVERS: self.has_namespaces,
            Protection.DISK: self.has_namespaces,
        }
        return tuple(str(name) for name, holds in kept.items() if holds)

    def folder(self, outside: Path) -> str:
        """The program's folder as it sees it."""
        return INSIDE if self.has_namespaces else str(outside)

    def processes(self, limits: Limits, user: int | None) -> int:
        """The limit to set: one that counts all of a user's processes must add those that run."""
        if self.has_namespaces or user is not None:
            # Process 1 of the namespaces is counted too.
            return limits.processes + (self.has_namespaces and 1)
        return limits.processes + tasks_of(os.geteuid())

    def command(self, limits: Limits) -> list[str]:
        """What stands before the launcher's own command."""
        if self.kind == "bwrap":
            spaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
            user = ["--hostname", "box", "--uid", "1000", "--gid", "1000"]
            steps = as_bubblewrap(room(self.python, limits.disk_bytes))
            return [_found("bwrap"), *spaces, *user, *steps, "--"]
        # Ends the program when the thread that started it ends.
        tied = [_found("setpriv"), "--pdeathsig", "KILL", "--"]
        if self.kind == "plain":
            return tied
        # The launcher needs the rights in the namespaces to build the file system, and drops them.
        user = ["--user", "--map-user=1000", "--map-group=1000", "--keep-caps"]
        spaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        return [*tied, _found("unshare"), *user, *spaces, "--"]


def _found(tool: str) -> str:
    return shutil.which(tool) or tool


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


def tasks_of(user: int) -> int:
    """Threads that now run as `user`."""
    total = 0
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and path.stat().st_uid == user:
                total += len(os.listdir(path / "task"))
    return total


def as_user(user: int | None) -> dict[str, Any]:
    """Arguments of `Popen` for a program that runs as `user`."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}

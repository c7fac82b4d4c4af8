"""The ways in which this machine can box a program, the strongest first, and what holds in each.

`bwrap` (bubblewrap) shows the program a file system of its own: system libraries to read, one
memory disk to write. `unshare` (util-linux) takes the network and the sight of other processes away
but leaves the files. A user of its own, where we are root, binds the limit on processes, and hides
what is not readable for all. Each way is tried once, by running a program in it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.sandbox.program import Limits

_OWN_USERS = ((0x60000000, 1 << 20), (50_000, 10_000))
"""First user and number of users; the second range fits into containers that map 65,536 users."""
_TRY_SECONDS = 20.0
_INSIDE = "/box"
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")


class Protection(StrEnum):
    """What a way may hold; the limits of `Limits`, an empty environment and a fresh session always
    do, but for `processes` and `disk`."""

    PROCESSES = "processes"
    """The limit on processes binds: a fork bomb ends."""
    NETWORK = "network"
    """No network, not even loopback's listeners."""
    FILES = "files"
    """Files of ours cannot be seen."""
    OTHERS = "others"
    """Other processes can be neither signalled nor read."""
    LEFTOVERS = "leftovers"
    """Nothing outlives the program."""
    DISK = "disk"
    """All files together are bounded."""


@dataclass(frozen=True)
class Way:
    """One way to box a program."""

    kind: str
    """`bwrap`, `unshare` or `plain`."""
    python: str
    """The interpreter that the program finds as `python`."""
    own_user: bool
    """Whether each program runs as a user of its own."""

    @property
    def name(self) -> str:
        """For people."""
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
            Protection.FILES: self.kind == "bwrap",
            Protection.OTHERS: self.has_namespaces or self.own_user,
            Protection.LEFTOVERS: self.has_namespaces or self.own_user,
            Protection.DISK: self.kind == "bwrap",
        }
        return tuple(str(name) for name, holds in kept.items() if holds)

    def folder(self, outside: Path) -> str:
        """The program's folder as it sees it."""
        return _INSIDE if self.kind == "bwrap" else str(outside)

    def processes(self, limits: Limits, user: int | None) -> int:
        """The limit to set: one that counts all of a user's processes must add those that run."""
        if self.has_namespaces or user is not None:
            # Process 1 of the namespaces is counted too.
            return limits.processes + (self.has_namespaces and 1)
        return limits.processes + tasks_of(os.geteuid())

    def command(self, limits: Limits) -> list[str]:
        """What stands before the launcher's own command."""
        if self.kind == "bwrap":
            return [*_bwrap(limits, self.python)]
        # Ends the program when the thread that started it ends.
        tied = [_found("setpriv"), "--pdeathsig", "KILL", "--"]
        if self.kind == "plain":
            return tied
        spaces = ["--user", "--map-current-user", "--net", "--pid", "--ipc"]
        return [*tied, _found("unshare"), *spaces, "--fork", "--kill-child", "--"]


def _found(tool: str) -> str:
    return shutil.which(tool) or tool


def _bwrap(limits: Limits, python: str) -> Iterator[str]:
    yield from (_found("bwrap"), "--unshare-all", "--unshare-user", "--disable-userns")
    yield from ("--die-with-parent", "--hostname", "box", "--uid", "1000", "--gid", "1000")
    yield from ("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache")
    yield from ("/etc/ld.so.cache", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives")
    for folder in _SYSTEM_FOLDERS:
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                yield from ("--symlink", os.readlink(folder), folder)
            elif os.path.isdir(folder):
                yield from ("--ro-bind", folder, folder)
    prefix = str(Path(python).parents[1])
    if not prefix.startswith("/usr") and prefix != "/":
        yield from ("--ro-bind", prefix, prefix)
    # Installed packages may hold the answers; gradus itself may be one of them.
    for folder in _installed_packages(prefix):
        yield from ("--size", "4096", "--tmpfs", folder, "--remount-ro", folder)
    # A program of root's, without a user of its own, could set the kernel's variables in /proc/sys.
    yield from ("--proc", "/proc", "--remount-ro", "/proc")
    yield from ("--dev", "/dev", "--remount-ro", "/dev")
    yield from ("--size", str(limits.disk_bytes), "--tmpfs", _INSIDE, "--chdir", _INSIDE)
    yield from ("--symlink", _INSIDE.lstrip("/"), "/tmp", "--remount-ro", "/", "--")


@cache
def _installed_packages(prefix: str) -> tuple[str, ...]:
    """Folders of installed Python packages that a box would show."""
    found = (
        folder.resolve()
        for root in ("/usr", "/usr/local", prefix)
        for name in ("site-packages", "dist-packages")
        for folder in Path(root).glob(f"lib*/python3*/{name}")
    )
    roots = {"/usr", prefix}
    inside = {str(folder) for folder in found if any(folder.is_relative_to(r) for r in roots)}
    return tuple(sorted(inside))


@contextlib.contextmanager
def claimed_user(way: Way) -> Iterator[int | None]:
    """A user that no other program on this machine runs as, or None where none is needed.

    The claim is an abstract socket, which the kernel gives back when we end, however we end.
    """
    if not way.own_user:
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


def ways_here() -> Iterator[Way]:
    """The ways that work here, the strongest first."""
    own = (True, False) if os.geteuid() == 0 else (False,)
    system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    base = getattr(sys, "_base_executable", None) or sys.executable
    pythons = list(dict.fromkeys(os.path.realpath(path) for path in (base, system) if path))
    for own_user in own:
        for kind in ("bwrap", "unshare", "plain"):
            found = (Way(kind, python, own_user) for python in pythons)
            yield from itertools.islice(filter(_works, found), 1)


@cache
def strongest_way() -> Way:
    """The first of `ways_here`; ConfigError where not even the last one works."""
    for way in ways_here():
        return way
    raise ConfigError(
        "no program can be boxed here: install util-linux (setpriv) and a system Python, better "
        "also bubblewrap"
    )


def _works(way: Way) -> bool:
    """Whether a program runs in it, without privileges."""
    program = "import os, sys; sys.exit(os.geteuid() == 0)"
    expected = 0 if way.own_user or way.kind == "bwrap" or os.geteuid() != 0 else 1
    command = [*way.command(Limits()), way.python, "-I", "-S", "-c", program]
    try:
        with claimed_user(way) as user:
            done = subprocess.run(
                command,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                capture_output=True,
                timeout=_TRY_SECONDS,
                check=False,
                start_new_session=True,
                **as_user(user),
            )
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return done.returncode == expected


def as_user(user: int | None) -> dict[str, Any]:
    """Arguments of `Popen` for a program that runs as `user`."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}

"""What listens in the processes of a run, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"
"""State of a TCP socket that listens."""
_ACCEPTS = 0x10000
"""Flag of a unix socket that listens (`__SO_ACCEPTCON`)."""


@dataclass(frozen=True)
class Listener:
    """One listening socket."""

    pid: int
    address: str
    """An IP address, or the path of a unix socket; "@..." is one without a file."""
    port: int = 0

    @property
    def is_tcp(self) -> bool:
        return self.port > 0


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Every listening socket that one of these processes holds, each once."""
    known = _tcp("tcp", socket.AF_INET) | _tcp("tcp6", socket.AF_INET6) | _unix()
    found = {}
    for pid in pids:
        for inode in _sockets(pid) & known.keys():
            found.setdefault(inode, Listener(pid, *known[inode]))
    return list(found.values())


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _tcp(name: str, family: int) -> dict[str, tuple[str, int]]:
    found = {}
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        fields = line.split()
        host, _, port = fields[1].partition(":")
        if fields[3] == _LISTENS:
            # Words of four bytes, each in the byte order of this machine.
            words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
            found[fields[9]] = (socket.inet_ntop(family, b"".join(words)), int(port, 16))
    return found


def _unix() -> dict[str, tuple[str, int]]:
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _ACCEPTS:
            found[fields[6]] = (fields[7] if len(fields) > 7 else "", 0)
    return found

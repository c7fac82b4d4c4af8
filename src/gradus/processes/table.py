"""What the operating system says about processes: start times, descendants, inherited marks.

A pid is only ever used together with its start time, so that a recycled pid is never hit. A zombie
counts as dead: it holds nothing and may wait long for its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_GET_CHILD_SUBREAPER = 37


@dataclass(frozen=True)
class ProcessEntry:
    """One living process."""

    pid: int
    parent: int
    session: int
    start_time: int
    """Clock ticks after boot; pid and start time together never name another process."""


def read_process(pid: int) -> ProcessEntry | None:
    entry = _read_stat(pid)
    return None if entry is None or entry[1] in "ZX" else entry[0]


def is_alive(pid: int, start_time: int) -> bool:
    """Whether the very process that started at `start_time` still runs."""
    entry = read_process(pid)
    return entry is not None and entry.start_time == start_time


def living_processes() -> list[ProcessEntry]:
    return [entry for entry, state in _every_stat() if state not in "ZX"]


def zombie_children(parent: int) -> list[ProcessEntry]:
    """Dead children of `parent` that were not waited for."""
    return [entry for entry, state in _every_stat() if state == "Z" and entry.parent == parent]


def stopped_processes() -> list[ProcessEntry]:
    """Every process that a signal such as SIGSTOP stopped; one under a debugger does not count."""
    return [entry for entry, state in _every_stat() if state == "T"]


def is_stopped(pid: int) -> bool:
    entry = _read_stat(pid)
    return entry is not None and entry[1] == "T"


def descendants(root: int, processes: list[ProcessEntry]) -> list[ProcessEntry]:
    """Children of `root`, their children, and so on; without `root` itself."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in processes:
        children.setdefault(entry.parent, []).append(entry)
    found: list[ProcessEntry] = []
    waiting = [root]
    while waiting:
        for entry in children.get(waiting.pop(), []):
            found.append(entry)
            waiting.append(entry.pid)
    return found


def _is_subreaper() -> bool:
    answer = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def children_in_other_sessions() -> list[ProcessEntry]:
    """Living children of this process that are not part of its session; none without the role."""
    if not _is_subreaper():
        return []
    own, session = os.getpid(), os.getsid(0)
    return [e for e in living_processes() if e.parent == own and e.session != session]


def own_mark() -> str:
    entry = read_process(os.getpid())
    return f"{os.getpid()}.{entry.start_time if entry else 0}"


def signal_process(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a handler of process `pid` takes the signal; it would end any other."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def carries_mark(pid: int, name: str, value: str) -> bool:
    """Whether `pid` was started with environment variable `name` = `value`."""
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{name}={value}".encode() in variables


def system_memory(system: Path = Path("/")) -> dict[str, int]:
    """What the kernel says of this machine's memory, in bytes; nothing where it does not."""
    try:
        text = (system / "proc/meminfo").read_text(errors="replace")
    except OSError:
        return {}
    found = re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    return {name: int(size) << 10 for name, size in found}


def resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 when it is gone."""
    try:
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def used_seconds(pid: int) -> float:
    """The seconds that a process kept a core busy; 0 when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def memory_kills(groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of this memory group the kernel has ended for want of memory.

    None where it does not say, as outside of any group.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for _, controllers, place in (line.split(":", 2) for line in lines):
        folder, name = groups / "memory", "memory.oom_control"
        if not controllers:
            folder, name = groups, "memory.events"
        elif "memory" not in controllers.split(","):
            continue
        # Inside a container its own group is often the root.
        for path in (folder / place.lstrip("/") / name, folder / name):
            with contextlib.suppress(OSError, ValueError):
                words = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
                if "oom_kill" in words:
                    return int(words["oom_kill"])
    return None


def _every_stat() -> Iterator[tuple[ProcessEntry, str]]:
    for path in _PROC.iterdir():
        if path.name.isdigit() and (found := _read_stat(int(path.name))) is not None:
            yield found


def _read_stat(pid: int) -> tuple[ProcessEntry, str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    entry = ProcessEntry(
        pid=pid, parent=int(fields[1]), session=int(fields[3]), start_time=int(fields[19])
    )
    return entry, fields[0]

"""The faults that a run can be given from outside, and how each is done."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradus.files import read_json
from gradus.processes.table import ProcessEntry, descendants, living_processes, signal_process
from gradus.run.paths import RunDirectory

LAUNCHER = "launcher"
_HELPERS = ("resource_tracker", "forkserver")
"""Processes of Python's own that do none of a run's work."""
_DAMAGED_BYTES = 64
LIMITS = {"memory": resource.RLIMIT_AS, "disk": resource.RLIMIT_FSIZE}
"""Kind of fault → what a process may have no more of, for a while."""


@dataclass(frozen=True)
class Victim:
    """A process that a fault can hit."""

    name: str
    """Of the role; `<role>/<n>` is the n-th process below it."""
    pid: int


@dataclass(frozen=True)
class Injected:
    """One fault, ready to be done."""

    kind: str
    """`kill` (SIGKILL), `stop` (SIGSTOP until something ends it), `pause` (stopped for a while),
    `memory` and `disk` (for a while it gets no more memory, or can write no file), or `damage`
    (bytes of the newest checkpoint are turned, then the trainer is killed)."""
    victim: Victim

    def __str__(self) -> str:
        return f"{self.kind} {self.victim.name}"


def victims(run_dir: RunDirectory, launcher: int) -> list[Victim]:
    """Every process of a run that does some of its work."""
    try:
        registry = read_json(run_dir.processes)["processes"]
    except FileNotFoundError:
        registry = []
    living = living_processes()
    pids = {entry.pid for entry in living}
    found = [Victim(LAUNCHER, launcher)] if launcher in pids else []
    for child in registry:
        if child["pid"] not in pids:
            continue
        found.append(Victim(child["name"], child["pid"]))
        below = [it for it in descendants(child["pid"], living) if _works(it)]
        found += [Victim(f"{child['name']}/{n}", it.pid) for n, it in enumerate(below, 1)]
    return found


def _works(entry: ProcessEntry) -> bool:
    try:
        command = Path(f"/proc/{entry.pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    # The engine is forked from a server of multiprocessing, and has a title of its own.
    return bool(command) and not any(f"multiprocessing.{name}" in command for name in _HELPERS)


def choose(
    found: Sequence[Victim], kinds: Sequence[str], draw: random.Random, *, has_checkpoint: bool
) -> Injected:
    """A fault: first its kind, then who, so that no role is hit more for having many processes."""
    roles = sorted({victim.name.partition("/")[0] for victim in found})
    kind = draw.choice([it for it in kinds if it != "damage" or has_checkpoint])
    if kind in LIMITS:
        # A launcher that ends by an error says why, and nobody starts it again.
        roles = [it for it in roles if it != LAUNCHER] or roles
    role = "trainer" if kind == "damage" and "trainer" in roles else draw.choice(roles)
    of_role = [it for it in found if it.name.partition("/")[0] == role]
    return Injected(kind, draw.choice(of_role))


def do(fault: Injected, run_dir: RunDirectory) -> None:
    """Do it; a process that has ended meanwhile is left alone."""
    if fault.kind in LIMITS:
        limit(fault.victim.pid, fault.kind)
        return
    if fault.kind == "damage":
        damage_newest(run_dir)
    is_end = fault.kind in ("kill", "damage")
    signal_process(fault.victim.pid, signal.SIGKILL if is_end else signal.SIGSTOP)


def undo(fault: Injected) -> None:
    """Let a process go on that was paused, or give it back what it was denied."""
    if fault.kind not in LIMITS:
        signal_process(fault.victim.pid, signal.SIGCONT)
        return
    # What it has started meanwhile inherited the limit.
    for pid in (
        fault.victim.pid,
        *(it.pid for it in descendants(fault.victim.pid, living_processes())),
    ):
        limit(pid, fault.kind, is_over=True)


def limit(pid: int, kind: str, *, is_over: bool = False) -> None:
    """Lower the soft limit of a process to what it has, or raise it to the hard one again."""
    what = LIMITS[kind]
    with suppress(OSError):  # it has ended
        _, most = resource.prlimit(pid, what)
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        has = pages * os.sysconf("SC_PAGE_SIZE") if kind == "memory" else 0
        resource.prlimit(pid, what, (most if is_over else has, most))


def damage_newest(run_dir: RunDirectory) -> None:
    """Turn some bytes in the middle of the largest file of the newest checkpoint."""
    folder = max(run_dir.checkpoints.glob("step_*"))
    path = max((it for it in folder.rglob("*") if it.is_file()), key=lambda it: it.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        before = file.read(_DAMAGED_BYTES)
        file.seek(-len(before), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in before))


def resident_mib(pid: int) -> int:
    """Memory that a process holds; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def num_files(pid: int) -> int:
    """Open files of a process; 0 when it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0

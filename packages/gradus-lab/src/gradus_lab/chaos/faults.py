"""The faults that a run can be given from outside, and how each is done."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradus.errors import ConfigError
from gradus.files import read_json
from gradus.processes.table import ProcessEntry, descendants, living_processes, signal_process
from gradus.run.paths import RunDirectory
from gradus_lab.chaos import links

LAUNCHER = "launcher"
PAUSE_SECONDS = 5.0
KINDS = {
    "kill": "the process is killed",
    "stop": "it is stopped until something ends it",
    "pause": f"it is stopped for {PAUSE_SECONDS:g} s",
    "disk": f"it can write no file for {PAUSE_SECONDS:g} s",
    "damage": "bytes of the newest checkpoint are turned, then the trainer is killed",
    "cut": "its connections of TCP are reset, at both ends",
    "mute": f"no packet of TCP reaches it for {PAUSE_SECONDS:g} s, and nobody is told",
    "clock": f"for every process it is an hour later, or earlier, for {PAUSE_SECONDS:g} s",
    "memory": f"it gets no more memory for {PAUSE_SECONDS:g} s; only when asked for",
}
"""Kind → what is done."""
DEFAULT_KINDS = tuple(it for it in KINDS if it != "memory")
"""Python may wait forever for a thread that found no memory, until its silence ends the process."""
LINKS = ("cut", "mute")
LIMITS = {"memory": resource.RLIMIT_AS, "disk": resource.RLIMIT_FSIZE}
"""Kind of fault → what a process may have no more of, for a while."""
PASSING = ("pause", *LIMITS, "mute", "clock")
"""Kinds that end by `undo`."""
HOURS = {"+1h": 3600, "-1h": -3600}
_HELPERS = ("resource_tracker", "forkserver")
"""Processes of Python's own that do none of a run's work."""
_DAMAGED_BYTES = 64
_TURNED_CLOCK = '''
"""The time of day as `gradus lab chaos` turns it, in each process of Python with this folder on
its path. Its neighbours of the same name still count."""
import mmap, os, sys, time
folder = os.path.dirname(__file__)
with open(os.path.join(folder, "offset"), "rb") as file:
    said = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + int(said[:])
time.time_ns = lambda: real_ns() + int(said[:]) * 10**9
sys.path[:] = [it for it in sys.path if it != folder]
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = this
'''


def kinds_here(asked: Sequence[str]) -> tuple[Sequence[str], str]:
    """The kinds of faults that were asked for, or else all that can be done on this machine, and
    what is said of the others. ConfigError for one that was asked for and cannot be done."""
    if wrong := [kind for kind in asked if kind not in KINDS]:
        raise ConfigError(f"--kind {wrong[0]}: choose from {', '.join(KINDS)}")
    kinds = asked or DEFAULT_KINDS
    affected = [kind for kind in kinds if kind in LINKS]
    if not affected or (why := links.refusal()) is None:
        return kinds, ""
    if asked:
        raise ConfigError(f"--kind {affected[0]} cannot be done here: {why}; leave it out")
    left = [kind for kind in kinds if kind not in LINKS]
    return left, f"{' and '.join(LINKS)} are left out: {why}"


class Clock:
    """The time of day of a run, which can be turned without root and for nobody else.

    Not by libfaketime: with its 0.9.10, that of Debian 12, `time.sleep` of Python 3.11 fails.
    """

    def __init__(self, run_dir: RunDirectory) -> None:
        self._folder = run_dir.root.with_name(f"{run_dir.root.name}.chaos.clock")
        self._offset = self._folder / "offset"

    def variables(self) -> dict[str, str]:
        """What the processes of a run need to be given, to go by this clock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "sitecustomize.py").write_text(_TURNED_CLOCK)
        self._offset.touch()
        self.turn(0)
        path = os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path}

    def turn(self, seconds: int) -> None:
        """Say at once to all how far their clock is off."""
        with self._offset.open("r+") as file:
            file.write(f"{seconds:+08d}")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class Victim:
    """A process that a fault can hit."""

    name: str
    """Of the role; `<role>/<n>` is the n-th process below it."""
    pid: int
    is_linked: bool = False
    """Whether it has a connection of TCP."""

    @property
    def role(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Injected:
    """One fault, ready to be done."""

    kind: str
    """One of KINDS."""
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
    connected = links.connections()
    found = [(LAUNCHER, launcher)] if launcher in pids else []
    for child in registry:
        if child["pid"] not in pids:
            continue
        found.append((child["name"], child["pid"]))
        below = [it for it in descendants(child["pid"], living) if _works(it)]
        found += [(f"{child['name']}/{n}", it.pid) for n, it in enumerate(below, 1)]
    return [Victim(name, pid, links.is_linked(pid, connected)) for name, pid in found]


def _works(entry: ProcessEntry) -> bool:
    process = Path(f"/proc/{entry.pid}")
    try:
        command = (process / "cmdline").read_bytes().decode(errors="replace")
        name = (process / "comm").read_text(errors="replace")
    except OSError:
        return False
    # The engine is forked from a copy of its server, which differs from that by its name alone.
    is_helper = any(f"multiprocessing.{it}" in command for it in _HELPERS) or "forkserver" in name
    return bool(command) and not is_helper


def choose(
    found: Sequence[Victim], kinds: Sequence[str], draw: random.Random, *, has_checkpoint: bool
) -> Injected | None:
    """A fault: first its kind, then who, so that no role is hit more for having many processes.

    None while nobody can suffer any of these kinds.
    """
    possible = [kind for kind in kinds if _who(kind, found, has_checkpoint)]
    if not possible:
        return None
    kind = draw.choice(possible)
    them = _who(kind, found, has_checkpoint)
    role = draw.choice(sorted({it.role for it in them}))
    return Injected(kind, draw.choice([it for it in them if it.role == role]))


def _who(kind: str, found: Sequence[Victim], has_checkpoint: bool) -> list[Victim]:
    """Whom a fault of this kind can hit."""
    if kind == "clock":
        return [Victim(hour, it.pid) for it in found if it.name == LAUNCHER for hour in HOURS]
    if kind == "damage":
        return [it for it in found if it.role == "trainer" and has_checkpoint]
    if kind in LIMITS:
        # A launcher that ends by an error says why, and nobody starts it again.
        return [it for it in found if it.name != LAUNCHER]
    return [it for it in found if it.is_linked or kind not in LINKS]


def do(fault: Injected, run_dir: RunDirectory) -> None:
    """Do it; a process that has ended meanwhile is left alone."""
    pid = fault.victim.pid
    match fault.kind:
        case "memory" | "disk":
            limit(pid, fault.kind)
        case "cut":
            links.cut(pid)
        case "mute":
            links.mute(pid)
        case "clock":
            Clock(run_dir).turn(HOURS[fault.victim.name])
        case "stop" | "pause":
            signal_process(pid, signal.SIGSTOP)
        case "damage":
            damage_newest(run_dir)
            signal_process(pid, signal.SIGKILL)
        case _:
            signal_process(pid, signal.SIGKILL)


def undo(fault: Injected, run_dir: RunDirectory) -> None:
    """Let a process go on that was paused, or give it back what it was denied."""
    pid = fault.victim.pid
    match fault.kind:
        case "memory" | "disk":
            # What it has started meanwhile inherited the limit.
            below = descendants(pid, living_processes())
            for each in (pid, *(it.pid for it in below)):
                limit(each, fault.kind, is_over=True)
        case "mute":
            links.unmute(pid)
        case "clock":
            Clock(run_dir).turn(0)
        case _:
            signal_process(pid, signal.SIGCONT)


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

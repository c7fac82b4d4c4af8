"""Processes that a launch left: what the registry names and what carries its mark."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from gradus.errors import CorruptStateError, ProcessError
from gradus.files import read_json
from gradus.processes.child import LAUNCH_VARIABLE
from gradus.processes.table import (
    ProcessEntry,
    carries_mark,
    descendants,
    is_alive,
    living_processes,
    signal_process,
)

POLL_SECONDS = 0.05
KILL_SECONDS = 5.0
TEMPORARY_PREFIX = "gradus-"


def end_leftovers(registry: Path, *, timeout_seconds: float) -> None:
    """End what a killed launcher left running: wait for it to end by itself, then KILL.

    Hits only processes that the registry names by pid and start time, and what carries its mark.
    The temporary folder of that launch is removed.
    """
    try:
        content = read_json(registry)
    except FileNotFoundError:
        return
    try:
        mark = str(content["launch"])
        known = [(int(p["pid"]), int(p["start_time"])) for p in content["processes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(
            f"{registry} does not list processes ({error!r}); make sure that none of this run is "
            "left, then delete it"
        ) from error
    deadline = time.monotonic() + timeout_seconds
    while True:
        roots = {pid for pid, start_time in known if is_alive(pid, start_time)}
        left = belonging_to(roots, mark)
        if not left:
            _remove_temporary(content.get("temporary_folder"))
            return
        if time.monotonic() >= deadline + KILL_SECONDS:
            pids = ", ".join(str(entry.pid) for entry in left)
            raise ProcessError(f"processes {pids} of an earlier run do not end even when killed")
        if time.monotonic() >= deadline:
            for entry in left:
                signal_process(entry.pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def launch_of(registry: Path) -> str | None:
    """The mark of the launch that a registry is of; None where it does not say."""
    try:
        return str(read_json(registry)["launch"])
    except (OSError, CorruptStateError, KeyError, TypeError):
        return None


def was_ended_from_outside(registry: Path, pid: int) -> bool | None:
    """Whether somebody else ended a process that is restarted; None until its launcher says."""
    try:
        ended = read_json(registry)["ended"].values()
    except (OSError, CorruptStateError, KeyError):
        return None
    return next((bool(it["from_outside"]) for it in ended if it["pid"] == pid), None)


def left_of(registry: Path) -> list[ProcessEntry]:
    """What runs of the launch that wrote a registry, its launcher apart."""
    content = read_json(registry)
    known = ((it["pid"], it["start_time"]) for it in content["processes"])
    roots = {pid for pid, start_time in known if is_alive(pid, start_time)}
    return belonging_to(roots, content["launch"])


def _remove_temporary(folder: object) -> None:
    """Remove the folder that a registry names, if it looks like one that a launch made."""
    if not isinstance(folder, str) or not Path(folder).name.startswith(TEMPORARY_PREFIX):
        return
    path = Path(folder)
    if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
        shutil.rmtree(path, ignore_errors=True)


def belonging_to(roots: set[int], mark: str) -> list[ProcessEntry]:
    """Living processes below `roots`, in their sessions, or with the mark; never ourselves."""
    processes = living_processes()
    below = {entry.pid for root in roots for entry in descendants(root, processes)}
    return [
        entry
        for entry in processes
        if entry.pid != os.getpid()
        and (
            entry.pid in roots
            or entry.pid in below
            or entry.session in roots
            or carries_mark(entry.pid, LAUNCH_VARIABLE, mark)
        )
    ]

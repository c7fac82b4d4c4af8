"""`gradus` commands as a user starts them, what they leave behind, and waiting with a deadline.

The only module of the tests that sleeps.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradus.files import read_json
from gradus.processes.table import is_alive, living_processes
from gradus.run.paths import RunDirectory

GRADUS = ("-m", "gradus.cli.main")
FINISH_SECONDS = 300.0
_PAUSE_SECONDS = 0.005


def start(
    *words: str,
    program: tuple[str, ...] = GRADUS,
    variables: Mapping[str, str] | None = None,
    stdin: int | None = None,
) -> subprocess.Popen[str]:
    """`gradus WORDS`, stdout and stderr in one pipe; `program` replaces `gradus`."""
    return subprocess.Popen(
        [sys.executable, *program, *words],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(variables or {})},
    )


def finish(
    process: subprocess.Popen[str],
    *,
    exit_code: int | None = 0,
    seconds: float = FINISH_SECONDS,
) -> str:
    """All that it printed; AssertionError for another exit code. None means any failure."""
    printed, _ = process.communicate(timeout=seconds)
    has_ended_so = process.returncode == exit_code
    if exit_code is None:
        has_ended_so = process.returncode > 0
    assert has_ended_so, f"exit code {process.returncode}\n{printed}"
    return printed


def kill(run_dir: Path, name: str, *, is_rank: bool = False) -> None:
    """kill -9 of one process of a run, by the pid in the run's registry; with `is_rank` of the last
    one that it started."""
    registry = read_json(RunDirectory(run_dir).processes)
    (entry,) = [entry for entry in registry["processes"] if entry["name"] == name]
    assert is_alive(entry["pid"], entry["start_time"]), f"{name} does not run any more"
    pid = entry["pid"]
    if is_rank:
        pid = max(it.pid for it in living_processes() if it.parent == pid)
    os.kill(pid, signal.SIGKILL)


def wait_for_checkpoint(
    run_dir: Path, step: int, process: subprocess.Popen[str], *, seconds: float = 120.0
) -> None:
    """Until a run has saved after so many steps; AssertionError when it ends before."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    wait_until(
        lambda: folder.exists() or process.poll() is not None,
        timeout_seconds=seconds,
        what=f"checkpoint {step}",
    )
    assert process.poll() is None, process.communicate()


def processes_of(run_dir: Path) -> list[int]:
    """Living processes whose command line names the run directory."""
    found = []
    for entry in living_processes():
        try:
            command = Path(f"/proc/{entry.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(run_dir) in command and entry.pid != os.getpid():
            found.append(entry.pid)
    return found


def records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a line that is still being written."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_until(
    condition: Callable[[], object], *, timeout_seconds: float = 60.0, what: str = "the condition"
) -> None:
    """Return as soon as `condition()` is true; AssertionError after `timeout_seconds`.

    >>> wait_until(lambda: True)
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true in {timeout_seconds:g} s")
        time.sleep(_PAUSE_SECONDS)


async def wait_until_async(
    condition: Callable[[], object], *, timeout_seconds: float = 60.0, what: str = "the condition"
) -> None:
    """`wait_until` that lets the event loop run meanwhile."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true in {timeout_seconds:g} s")
        await asyncio.sleep(_PAUSE_SECONDS)

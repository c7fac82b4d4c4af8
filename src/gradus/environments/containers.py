"""Containers of an environment process: a label that names their owner, and their removal.

verifiers removes an episode's container when the episode ends. A worker that is killed leaves its
containers to its environment process; if that is killed too, the next environment process that
uses the same engine on this machine removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.processes.table import is_alive, read_process

RUN_VARIABLE = "VF_RUN_ID"
"""verifiers labels every container with the value of this variable of its worker."""
LABEL = "verifiers.run"
ENGINE_SECONDS = 30.0
"""Deadline of one command of a container engine."""

ENGINES = ("docker", "podman")
"""The container engines of verifiers that answer `version`, the preferred first."""
_ENDED_FROM_OUTSIDE = ("137", "143")
"""Exit codes of a container that was killed or stopped: nothing in it can do that to process 1."""
_PREFIX = "gradus"
_REMOVED_AT_ONCE = 8
_TRIES = 5

log = get_logger(__name__)


def owner_label(run: str) -> str:
    """The label of this process's containers: run, machine, pid and start time.

    >>> owner_label("words").split(".")[:2]
    ['gradus', 'words']
    """
    entry = read_process(os.getpid())
    start_time = 0 if entry is None else entry.start_time
    return f"{_PREFIX}.{run}.{_machine()}.{os.getpid()}.{start_time}"


def is_orphaned(label: str) -> bool:
    """Whether a label is that of a process of this machine that has ended."""
    parts = label.rsplit(".", 3)
    if len(parts) != 4 or not parts[0].startswith(f"{_PREFIX}.") or parts[1] != _machine():
        return False
    pid, start_time = parts[2:]
    return pid.isdigit() and start_time.isdigit() and not is_alive(int(pid), int(start_time))


def _machine() -> str:
    """This boot of this machine; several may share an engine, and pids mean nothing elsewhere."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = os.stat("/proc/self/ns/pid").st_ino
        return hashlib.sha256(f"{boot} {numbers}".encode()).hexdigest()[:12]
    return "unknown"


def engines_of(verifiers_config: Mapping[str, Any]) -> list[str]:
    seats = [seat for seat in verifiers_config.values() if isinstance(seat, Mapping)]
    runtimes = [seat["runtime"] for seat in seats if isinstance(seat.get("runtime"), Mapping)]
    used = {runtime.get("type") for runtime in runtimes}
    return [engine for engine in ENGINES if engine in used]


def silence_of(engine: str) -> str | None:
    """Why a container engine does not answer; None when it does."""
    if shutil.which(engine) is None:
        return "there is no program of this name on PATH"
    try:
        done = subprocess.run(
            [engine, "version"], capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    told = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return told[-1] if done.returncode else None


def refuse_silent(engines: Iterable[str]) -> None:
    """ConfigError for an engine that does not answer: it would fail each episode in turn."""
    for engine in engines:
        if (why := silence_of(engine)) is not None:
            other = answering_engine()
            instead = f', or write agent.runtime = {{type = "{other}"}}' if other else ""
            raise ConfigError(
                f"container engine {engine!r} does not answer: {why}; start it{instead}"
            )


def answering_engine() -> str | None:
    return next((engine for engine in ENGINES if silence_of(engine) is None), None)


async def is_running(engine: str, container: str) -> bool:
    """Whether a container is there and has not ended."""
    told = await _ask(
        engine, "inspect", "--type", "container", "--format", "{{.State.Status}}", container
    )
    return told.strip() == "running"


async def is_kept(engine: str, container: str) -> bool:
    """Whether a container runs, or was ended by what ran in it and still exists.

    False where the engine lost it, or where it was stopped from outside.
    """
    told = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
    found = await _ask(engine, "inspect", "--type", "container", "--format", told, container)
    status, code, is_full = (found.split() + [""] * 3)[:3]
    if status in ("exited", "stopped"):
        return code not in _ENDED_FROM_OUTSIDE or is_full == "true"
    return status == "running"


async def remove_left_over(engines: Iterable[str]) -> int:
    """Remove the containers of killed processes; returns how many there were."""
    removed = await remove_containers(engines, is_orphaned)
    if removed:
        log.warning("removed %d containers that a killed run had left behind", removed)
    return removed


async def close_without_containers(
    close: Callable[[], Awaitable[None]], engines: Sequence[str], label: str
) -> None:
    """Close what plays in containers, and remove the containers with this label, new ones included.

    Containers are removed before too: closing an episode waits 10 s for a container whose first
    process ignores SIGTERM, longer than this process has before it is killed.
    """
    await remove_containers(engines, label.__eq__)
    await close()
    for _ in range(_TRIES):  # what was being started meanwhile
        if not await remove_containers(engines, label.__eq__):
            return


async def _labels(engine: str) -> dict[str, str]:
    """Container → label, of every container that verifiers started."""
    found = await _ask(engine, "ps", "--all", "--quiet", "--filter", f"label={LABEL}")
    ids = found.split()
    if not ids:
        return {}
    told = '{{.Id}} {{index .Config.Labels "' + LABEL + '"}}'
    lines = await _ask(engine, "inspect", "--type", "container", "--format", told, *ids)
    pairs = (line.split(maxsplit=1) for line in lines.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


async def remove_containers(engines: Iterable[str], is_meant: Callable[[str], bool]) -> int:
    """Remove the containers whose label `is_meant`; returns how many there were."""
    removed = 0
    for engine in engines:
        ids = [it for it, label in (await _labels(engine)).items() if is_meant(label)]
        removed += len(ids)
        at_once = asyncio.Semaphore(_REMOVED_AT_ONCE)
        await asyncio.gather(*(_remove(engine, it, at_once) for it in ids))
    return removed


async def _remove(engine: str, container: str, at_once: asyncio.Semaphore) -> None:
    """Alone: of several of which one is gone meanwhile, Podman removes none."""
    async with at_once:
        # Its first process ignores SIGTERM, for which `rm` alone would wait 10 s.
        await _ask(engine, "kill", container)
        await _ask(engine, "rm", "--force", container)


async def _ask(engine: str, *arguments: str) -> str:
    """Standard output of an engine's command; empty where it cannot answer."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(engine, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""  # the runtime itself says that its engine is not installed
    try:
        async with asyncio.timeout(ENGINE_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        log.warning("%s %s did not answer within %g s", engine, arguments[0], ENGINE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return ""
    return output.decode(errors="replace")

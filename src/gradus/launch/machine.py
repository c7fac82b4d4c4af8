"""Notes again and again what the processes of a launch take of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress

import msgspec

from gradus.files import add_line, free_bytes
from gradus.monitor.machine import FORMAT, MACHINE_SECONDS, MachineNumbers
from gradus.processes.supervisor import Supervisor
from gradus.processes.table import (
    descendants,
    living_processes,
    resident_bytes,
    system_memory,
    used_seconds,
)
from gradus.run.lease import RunLease

MAX_BYTES = 4 << 20
"""Of the file before it is renamed; the one before that goes then."""
_GPU = {"use": 0.01, "memory_bytes": float(1 << 20), "power_watts": 1.0}
_GPU_QUERY = ("index", "utilization.gpu", "memory.used", "power.draw")
_GPU_SECONDS = 8.0
_LAUNCHER = "launcher"


class MachineLog(AbstractContextManager["MachineLog"]):
    """Owns the thread that looks, from the start of a launch to its end."""

    def __init__(self, lease: RunLease, supervisor: Supervisor) -> None:
        self._run_dir, self._term = lease.run_dir, lease.term
        self._supervisor = supervisor
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="machine", daemon=True)
        self._used: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._nvidia = shutil.which("nvidia-smi")

    def __enter__(self) -> MachineLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(1.0)  # nvidia-smi may hang in the driver.

    def _follow(self) -> None:
        """Look until the launch ends.

        consumes: /proc, nvidia-smi    waits for: ten seconds
        produces: `machine.jsonl`      unblocked by: time, the end
        """
        self.look()
        while not self._is_over.wait(MACHINE_SECONDS):
            self.look()

    def look(self) -> None:
        """Note one line; nothing is noted where the disk does not take it."""
        path = self._run_dir.machine
        with suppress(OSError):
            if path.stat().st_size > MAX_BYTES:
                path.replace(self._run_dir.older_machine)
        numbers = {f"machine/{name}": value for name, value in self._numbers().items()}
        line = MachineNumbers(FORMAT, round(time.time(), 3), self._term, numbers)
        add_line(path, msgspec.json.encode(line).decode())

    def _numbers(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if (free := free_bytes(self._run_dir.root)) is not None:
            found["disk_free_bytes"] = free
        if (available := system_memory().get("MemAvailable")) is not None:
            found["memory_available_bytes"] = available
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        used: dict[str, float] = {}
        for name, pids in self._families().items():
            used[name] = sum(map(used_seconds, pids))
            found[f"{name}/memory_bytes"] = sum(map(resident_bytes, pids))
            # Of a child that ended its seconds are gone; less than nothing was never used.
            gained = used[name] - self._used.get(name, used[name])
            if name in self._used and now > before:
                found[f"{name}/cpu"] = round(max(0.0, gained) / (now - before), 3)
        self._used = used
        return found | (self._gpus(self._nvidia) if self._nvidia else {})

    def _families(self) -> dict[str, list[int]]:
        """Each process by name with all below it; the launcher alone, for all are below it."""
        living = living_processes()
        alive = {it.pid for it in living}
        families = {_LAUNCHER: [os.getpid()]}
        here = {it.spec.name: it.pid for it in [*self._supervisor.children] if it.spec.node == 0}
        for name, pid in here.items():
            below = [it.pid for it in descendants(pid, living)]
            if pid in alive or below:
                families[name] = [pid, *below]
        return families

    def _gpus(self, program: str) -> dict[str, float]:
        query = [f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits"]
        try:
            told = subprocess.run(
                [program, *query], capture_output=True, text=True, timeout=_GPU_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        return dict(_gpu_numbers(told.stdout.splitlines()))


def _gpu_numbers(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    """The numbers of each GPU; those that it does not know, such as `[N/A]`, are left out."""
    for line in lines:
        index, *cells = (cell.strip() for cell in line.split(","))
        if not index.isdecimal() or len(cells) != len(_GPU):
            continue
        for (name, scale), cell in zip(_GPU.items(), cells, strict=True):
            with suppress(ValueError):
                yield f"gpu_{index}/{name}", float(cell) * scale

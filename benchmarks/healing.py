"""What each role's death or hang costs a run: seconds, steps, episodes, and whether weights change.

One run with two trainer ranks, a tracker and a scripted engine meets one fault after another: each
process of it is killed, stopped for good, made to end by itself with the codes 0 and 1, and denied
any more memory for five seconds (the launcher and what writes the logs are one process). A
second run with the same seed meets none. Both are synchronous and deterministic, so a version that
both served has the same digest unless a fault changed what was trained.

    python benchmarks/healing.py --output benchmarks/results/healing.json

`--config run.toml` takes a run of your own, with its engine; no digests are compared then, since a
real engine's tokens depend on what it batches together. `--role inference/1` hurts the engine below
its server alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradus.orchestrator.records.journal import read_journal
from gradus.processes.table import read_process
from gradus.run.paths import RunDirectory
from gradus.run.records import Place, RecordTail, read_records
from gradus.testing.tiny_model import build_tiny_model
from gradus_lab.chaos.faults import LAUNCHER, PAUSE_SECONDS, Victim, limit, victims
from gradus_lab.chaos.invariants import check_run

SCRIPTED = Path(__file__).parents[1] / "tests" / "end_to_end" / "scripted_run.py"
FAULTS = ("kill", "exit 0", "exit 1", "stop", "memory")
HANG_SECONDS = 20
LIMIT_SECONDS = 180.0
LATENCY_SECONDS = 0.7
REST_STEPS = 3
"""Finished in peace before each fault."""
TOML = """
max_steps = 5000
seed = 3
[model]
renderer = "qwen3"
max_length_tokens = 96
[checkpoint]
interval_steps = 5
[launch]
hang_seconds = {hang}
restarts = 1000
environment_restarts = 1000
[orchestrator]
groups_per_batch = 3
max_lag = 0
max_staleness = 0
[orchestrator.train.sampling]
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 4
num_workers = 2
[trainer]
num_processes = 2
deterministic = true
[trainer.optimizer]
lr = 1e-3
[[monitor]]
type = "tensorboard"
"""


@dataclass
class Cell:
    """One role under one fault."""

    role: str
    fault: str
    seconds: float | None = None
    """From the fault to the second step recorded after it: the first may have been almost done.
    None when the run ended or stood still."""
    told: str = ""
    """What the console said."""
    steps_again: int = 0
    episodes_again: int = 0
    """Started a second time under the same number."""
    broken: tuple[str, ...] = ()
    """Of what must hold in the run's folder."""


class Run:
    """One `gradus rl`, followed by its files."""

    def __init__(
        self,
        words: Sequence[str],
        run_dir: Path,
        program: Sequence[str],
        latency_seconds: float = 0.0,
    ) -> None:
        self._words = [*program, *words]
        self._variables = {"SCRIPTED_LATENCY_SECONDS": str(latency_seconds)}
        self.run_dir = RunDirectory(run_dir)
        self.output = run_dir.with_suffix(".out")
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [*self._words, *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self._variables,
            )

    def resume(self) -> None:
        self.process.wait()
        self.process = self._start("--resume")

    def num_steps(self) -> int:
        return sum(not it.is_evaluation for it in read_records(self.run_dir.metrics))

    def wait_for_steps(self, number: int, *, since: float = 0.0) -> float | None:
        """Seconds from `since`, in Unix time, to the last of so many steps recorded after it; None
        when the run ends, or stands still for too long."""
        deadline = time.monotonic() + LIMIT_SECONDS
        tail, after = RecordTail(self.run_dir, Place()), list[float]()
        while time.monotonic() < deadline and self.process.poll() is None:
            records = (it for it in tail.read() if not it.is_evaluation)
            after += [it.time for it in records if it.time > since]
            if len(after) >= number:
                return after[number - 1] - since
            time.sleep(0.1)
        return None

    def victim(self, role: str) -> Victim:
        """The process of a role, as soon as it is there."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            found = victims(self.run_dir, self.process.pid)
            for it in found:
                if it.name == role:
                    return it
            time.sleep(0.1)
        raise SystemExit(f"no process {role} among {[it.name for it in found]}")

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_SECONDS)

    def versions(self) -> dict[int, str]:
        """Version → digest of its weights, as last served."""
        lines = read_journal(self.run_dir.journal)
        return {it["version"]: it["weights"] for it in lines if it["event"] == "policy_applied"}

    def starts(self) -> Counter[str]:
        lines = read_journal(self.run_dir.journal)
        return Counter(it["episode"] for it in lines if it["event"] == "episode_started")


def hurt(run: Run, role: str, fault: str) -> Cell:
    """One fault, and what came of it."""
    cell = Cell(role, fault)
    run.wait_for_steps(REST_STEPS, since=time.time())
    victim = run.victim(role)
    starts, printed = run.starts(), run.output.stat().st_size
    at = time.time()
    do(fault, victim.pid)
    if fault == "memory":
        wait_until_ended(victim.pid, PAUSE_SECONDS)
        limit(victim.pid, "memory", is_over=True)
    if role == LAUNCHER and (fault != "memory" or read_process(victim.pid) is None):
        if fault == "stop":
            time.sleep(5.0)
            os.kill(victim.pid, signal.SIGCONT)
        else:
            run.resume()
    cell.seconds = run.wait_for_steps(2, since=at)
    more = run.output.read_bytes()[printed:].decode(errors="replace")
    lines = [it for it in more.splitlines() if not it.startswith(("step ", "probe "))]
    cell.told = " | ".join(it.strip() for it in lines if it.strip())[:600]
    cell.steps_again = sum(map(number_of, re.findall(r"(\w+) steps? (?:is|are) done again", more)))
    again = run.starts() - starts
    cell.episodes_again = sum(again[name] for name in starts)
    cell.broken = tuple(map(str, check_run(run.run_dir)))
    return cell


WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def number_of(word: str) -> int:
    return int(word) if word.isdigit() else WORDS.index(word)


def do(fault: str, pid: int) -> None:
    if fault.startswith("exit"):
        end_by_itself(pid, int(fault.split()[1]))
    elif fault == "memory":
        limit(pid, fault)
    else:
        os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def wait_until_ended(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and read_process(pid) is not None:
        time.sleep(0.05)


_NAMES = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx"),
    *("rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base"),
    *("ds", "es", "fs", "gs"),
)


class _Registers(ctypes.Structure):
    """`struct user_regs_struct` of x86-64 Linux."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in _NAMES]


_PTRACE = {
    "peekdata": 2,
    "pokedata": 5,
    "cont": 7,
    "getregs": 12,
    "setregs": 13,
    "attach": 16,
    "detach": 17,
}
_EXIT_GROUP = 231
_SYSCALL = 0x050F


def end_by_itself(pid: int, code: int) -> None:
    """Let a process call `exit_group(code)` wherever it is: no handler runs and nothing is
    flushed, as after `os._exit` in a plug-in. x86-64 Linux, ptrace(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long

    def ptrace(request: str, address: int = 0, data: Any = 0) -> int:
        ctypes.set_errno(0)
        answer = int(libc.ptrace(_PTRACE[request], pid, address, data))
        if answer == -1 and ctypes.get_errno():
            raise OSError(ctypes.get_errno(), f"ptrace {request} of {pid}")
        return answer

    ptrace("attach")
    wait_until_traced(pid)
    registers = _Registers()
    ptrace("getregs", 0, ctypes.byref(registers))
    # The other threads run the same code: where this one waits in a call, nothing is changed.
    if ptrace("peekdata", registers.rip - 2) & 0xFFFF == _SYSCALL:
        registers.rip -= 2
    else:
        ptrace("pokedata", registers.rip, _SYSCALL)
    registers.rax, registers.rdi = _EXIT_GROUP, code
    registers.orig_rax = 2**64 - 1  # No system call is to be begun again.
    ptrace("setregs", 0, ctypes.byref(registers))
    ptrace("cont")
    # Its parent is told first; we have only traced it.
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def wait_until_traced(pid: int) -> None:
    while "t (tracing stop)" not in Path(f"/proc/{pid}/status").read_text():
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def roles_of(run: Run) -> list[str]:
    """Every process of the run, the launcher last."""
    names = [it.name for it in victims(run.run_dir, run.process.pid)]
    return [*(it for it in names if it != LAUNCHER), LAUNCHER]


def measure(
    folder: Path, config: Path | None, faults: Sequence[str], roles: Sequence[str]
) -> dict[str, Any]:
    words = ["@", str(config or write_config(folder)), "--output-dir", str(folder)]
    program = [sys.executable, "-m", "gradus.cli.main", "rl"]
    if config is None:
        program = [sys.executable, str(SCRIPTED), "rl"]
    # Slow replies change no token, and keep the run that nothing hurts short.
    run = Run([*words, "--name", "hurt"], folder / "hurt", program, LATENCY_SECONDS)
    cells = []
    try:
        if run.wait_for_steps(REST_STEPS) is None:
            raise SystemExit(run.output.read_text())
        for fault in faults:
            for role in roles or roles_of(run):
                cells.append(hurt(run, role, fault))
                print(line_of(cells[-1]), flush=True)
                if cells[-1].seconds is None:
                    run.end()
                if run.process.poll() is not None:
                    run.resume()
    finally:
        code = run.end()
    found: dict[str, Any] = {
        "hang_seconds": HANG_SECONDS if config is None else None,
        "exit_code_after_sigterm": code,
        "steps": run.num_steps(),
        "broken_at_the_end": [str(it) for it in check_run(run.run_dir)],
        "cells": [asdict(it) for it in cells],
    }
    if config is None:
        found["versions"] = compare(run, Run([*words, "--name", "calm"], folder / "calm", program))
    return found


def compare(hurt_run: Run, calm: Run) -> dict[str, Any]:
    """Versions of both runs by the digest of their weights."""
    ours = hurt_run.versions()
    try:
        wanted = max(ours, default=0)
        while calm.num_steps() < wanted and calm.process.poll() is None:
            time.sleep(0.5)
    finally:
        calm.end()
    theirs = calm.versions()
    both = sorted(ours.keys() & theirs.keys())
    different = [it for it in both if ours[it] != theirs[it]]
    return {"compared": len(both), "different": different[:5], "num_different": len(different)}


def write_config(folder: Path) -> Path:
    model = build_tiny_model(folder / "model", hidden_size=96, num_layers=2)
    path = folder / "run.toml"
    text = TOML.format(hang=HANG_SECONDS).replace("[model]", f'[model]\nname = "{model}"', 1)
    path.write_text(text)
    return path


def line_of(cell: Cell) -> str:
    seconds = "never" if cell.seconds is None else f"{cell.seconds:5.1f} s"
    return (
        f"{cell.fault:<8}{cell.role:<26}{seconds}  {cell.steps_again} steps, "
        f"{cell.episodes_again} episodes again  {'; '.join(cell.broken) or 'nothing broken'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--role", action="append")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="healing-") as folder:
        found = measure(Path(folder), chosen.config, chosen.fault or FAULTS, chosen.role or [])
    print(json.dumps({name: it for name, it in found.items() if name != "cells"}, indent=1))
    if chosen.output:
        chosen.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

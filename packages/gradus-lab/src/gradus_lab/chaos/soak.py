"""`gradus lab chaos`: start a run, hurt it again and again, and look after each what still holds.

The idea is that of Jepsen's nemesis (Kingsbury, https://jepsen.io) and of Chaos Monkey (Netflix):
faults that happen anyway happen here first, one at a time, from a seed.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from gradus.errors import ExitCode
from gradus.log import printable
from gradus.processes.table import read_process
from gradus.run.lease import read_term
from gradus.run.paths import RunDirectory
from gradus.run.records import Place, RecordTail
from gradus_lab.chaos.faults import (
    DEFAULT_KINDS,
    LAUNCHER,
    LIMITS,
    PASSING,
    PAUSE_SECONDS,
    Clock,
    Injected,
    Victim,
    choose,
    do,
    num_files,
    resident_mib,
    undo,
    victims,
)
from gradus_lab.chaos.invariants import Broken, check_run

MOST_REST_SECONDS = 15.0
END_SECONDS = 120.0
"""Until a run that was asked to end has ended."""
SECOND_SECONDS = 4.0
"""Most between two faults of one round: a process that is replaced starts meanwhile."""
MIN_ROUNDS = 12
SLACK_MIB, SLACK_FILES = 256, 64
"""How much more a role may hold later, beside half as much again."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Plan:
    """What a soak does."""

    words: Sequence[str]
    """After the program."""
    run_dir: RunDirectory
    minutes: float
    seed: int
    kinds: Sequence[str] = DEFAULT_KINDS
    """One that stands there N times comes N times as often."""
    rest_seconds: float = MOST_REST_SECONDS
    """Most between a step and the next fault."""
    limit_seconds: float = 400.0
    """From a fault to the next step; a run that takes longer stands still."""
    is_double: bool = False
    """Whether each fault is followed by a second one within SECOND_SECONDS."""
    secrets: Sequence[bytes] = ()
    program: Sequence[str] = (sys.executable, "-P", "-m", "gradus.cli.main", "rl")


@dataclass
class Round:
    """One fault and what came of it; a line of the history."""

    number: int
    fault: str
    at: float
    """When, in seconds since 1970."""
    seconds: float | None = None
    """Until the next step was recorded; None when none was."""
    again: int = 0
    """Steps that were done again."""
    broken: list[str] = field(default_factory=list)
    memory_mib: dict[str, int] = field(default_factory=dict)
    """Of each process just before the fault."""
    files: dict[str, int] = field(default_factory=dict)


class Soak:
    """One run under faults."""

    def __init__(self, plan: Plan, history: Path, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._history = history
        self._tell = tell
        self._draw = random.Random(plan.seed)
        self._tail = RecordTail(plan.run_dir, Place())
        self._newest = -1
        self._again = 0
        self._output = history.with_suffix(".log")
        self._clock = Clock(plan.run_dir)
        self._variables = self._clock.variables() if "clock" in plan.kinds else {}
        self._process = self._start()
        self._rounds: list[Round] = []
        self._until = math.inf

    def run(self) -> list[Round]:
        """Until the time is over, the run ends by itself, or stands still.

        Interrupted, it ends the run first, and lets a launcher go on that it had paused.
        """
        try:
            return self._rounds_until_the_end()
        except BaseException:
            for number in (signal.SIGCONT, signal.SIGTERM):
                self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            raise
        finally:
            self._clock.close()

    def _rounds_until_the_end(self) -> list[Round]:
        self._until = time.monotonic() + 60 * self._plan.minutes
        is_moving = self._wait_for_step(self._plan.limit_seconds) is not None
        while is_moving and time.monotonic() < self._until:
            self._wait(self._draw.uniform(0.0, self._plan.rest_seconds))
            if self._process.poll() is not None:
                break
            if (found := self._one_round()) is None:
                continue
            self._note(found)
            is_moving = found.seconds is not None
        self._note(self._last_round(is_moving=is_moving))
        return self._rounds

    def _one_round(self) -> Round | None:
        """None while no fault can be done."""
        plan = self._plan
        found = victims(plan.run_dir, self._process.pid)
        if (first := self._choose(found)) is None:
            return None
        made = Round(
            len(self._rounds) + 1,
            str(first),
            time.time(),
            memory_mib={it.name: resident_mib(it.pid) for it in found},
            files={it.name: num_files(it.pid) for it in found},
        )
        began = time.monotonic()
        self._read_steps()
        self._again = 0
        do(first, plan.run_dir)
        faults = [first, *self._second(first)] if plan.is_double else [first]
        made.fault = " + ".join(map(str, faults))
        # Without its launcher, nothing ends a process that is stopped.
        for fault in sorted(faults, key=lambda it: (it.victim.name != LAUNCHER, it.kind == "stop")):
            self._see_through(fault)
        # A step that ended while a process was stopped says nothing of what followed.
        self._read_steps()
        if self._wait_for_step(plan.limit_seconds) is not None:
            made.seconds = time.monotonic() - began
        made.again = self._again
        made.broken = [str(it) for it in check_run(plan.run_dir, secrets=plan.secrets)]
        return made

    def _choose(self, found: Sequence[Victim]) -> Injected | None:
        checkpoints = list(self._plan.run_dir.checkpoints.glob("step_*"))
        return choose(found, self._plan.kinds, self._draw, has_checkpoint=len(checkpoints) > 1)

    def _second(self, first: Injected) -> list[Injected]:
        """One more, of another process, while the first is being healed."""
        if first.kind == "kill":
            self._see_through(first)
        self._wait(self._draw.uniform(0.0, SECOND_SECONDS))
        found = victims(self._plan.run_dir, self._process.pid)
        second = self._choose([it for it in found if it.pid != first.victim.pid])
        if second is None:
            return []
        do(second, self._plan.run_dir)
        return [second]

    def _see_through(self, fault: Injected) -> None:
        """What only whoever did the fault can do: let a process go on, start a launcher anew."""
        is_launcher = fault.victim.name == LAUNCHER
        if fault.kind in PASSING or (fault.kind == "stop" and is_launcher):
            ended = fault.victim.pid if fault.kind in LIMITS else None
            self._wait(PAUSE_SECONDS, until=lambda: ended is not None and not read_process(ended))
            undo(fault, self._plan.run_dir)
        elif fault.kind == "kill" and fault.victim.pid == self._process.pid:
            self._process.wait()
            term = read_term(self._plan.run_dir)
            self._process = self._start("--resume")
            # Until then, what the old launcher left may end a step.
            self._wait(self._plan.limit_seconds, until=lambda: read_term(self._plan.run_dir) > term)
        elif fault.kind == "stop":
            pid = fault.victim.pid
            self._wait(self._plan.limit_seconds, until=lambda: read_process(pid) is None)

    def _last_round(self, *, is_moving: bool) -> Round:
        """End the run, and look at what it leaves."""
        ended_by_itself = self._process.poll()
        made = Round(len(self._rounds) + 1, "end", time.time())
        if ended_by_itself is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            made.broken.append(str(Broken("I8", f"no end {END_SECONDS:g} s after SIGTERM")))
            self._process.kill()
            code = self._process.wait()
        wanted = (
            {ExitCode.DONE} if ended_by_itself is not None else {ExitCode.DONE, ExitCode.TRY_AGAIN}
        )
        if code not in wanted:
            made.broken.append(str(Broken("I8", f"exit code {code}: {self._last_line()}")))
        if not is_moving and ended_by_itself != ExitCode.DONE:
            limit = self._plan.limit_seconds
            made.broken.append(str(Broken("I8", f"no step within {limit:g} s of the last fault")))
        made.seconds = time.time() - made.at
        made.broken += map(str, check_run(self._plan.run_dir, secrets=self._plan.secrets))
        made.broken += map(str, grown(self._rounds))
        return made

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        words = [*self._plan.program, *self._plan.words, *more]
        with self._output.open("ab") as output:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._variables},
            )

    def _last_line(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines() or [""]
        return printable(lines[-1])

    def _wait_for_step(self, limit_seconds: float) -> float | None:
        """Seconds until a step is recorded that was not read before; None when there is none.

        By a clock that cannot be turned: the times in the records are those of the run.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < limit_seconds:
            # Whether it lives is asked first: it may write its last step and end in between.
            has_ended = self._process.poll() is not None
            if self._read_steps():
                return waited
            if has_ended:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def _read_steps(self) -> int:
        """How many steps were recorded that were not read yet."""
        found = [it.step for it in self._tail.read() if not it.is_evaluation]
        for step in found:
            self._again += step <= self._newest
            self._newest = max(self._newest, step)
        return len(found)

    def _wait(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Also no longer than the run lives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            if until():
                return
            time.sleep(_POLL_SECONDS)

    def _note(self, found: Round) -> None:
        self._rounds.append(found)
        with self._history.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        self._tell(line_of(found))


def line_of(found: Round) -> str:
    """A round for a person."""
    moved = "no step" if found.seconds is None else f"{found.seconds:6.1f} s"
    again = f"  {found.again} steps again" if found.again else ""
    broken = "".join(f"\n      BROKEN {printable(it)}" for it in found.broken)
    return f"{found.number:4d}  {found.fault:<32}{moved}{again}{broken}"


def sum_up(rounds: Sequence[Round]) -> list[str]:
    """What the faults cost, by role, and how much the processes grew."""
    lines = []
    by_role: dict[str, list[Round]] = {}
    for found in rounds[:-1]:
        for fault in re.sub(r"/\d+", "", found.fault).split(" + "):
            by_role.setdefault(fault, []).append(found)
    for name, of in sorted(by_role.items()):
        seconds = [it.seconds for it in of if it.seconds is not None]
        told = f"{median(seconds):.1f} s (longest {max(seconds):.1f})" if seconds else "never"
        again = sum(it.again for it in of)
        lines.append(f"{name:<28} {len(of):3d} times, next step after {told}, {again} steps again")
    broken = Counter(it.split()[0] for found in rounds for it in found.broken)
    kept = ", ".join(f"{rule} {count} times" for rule, count in sorted(broken.items()))
    lines.append(f"{len(rounds) - 1} faults; broken: {kept or 'nothing'}")
    return lines


def growth(rounds: Sequence[Round]) -> dict[str, Any]:
    """Role → its memory and open files, at most, in the first and the second half of the rounds."""
    names = sorted({name.partition("/")[0] for found in rounds for name in found.memory_mib})
    half = len(rounds) // 2

    def most(of: Sequence[Round], what: str, role: str) -> int:
        numbers = (getattr(it, what).items() for it in of)
        return max((n for it in numbers for name, n in it if name.startswith(role)), default=0)

    parts = rounds[:half], rounds[half:]
    return {
        role: [(most(of, "memory_mib", role), most(of, "files", role)) for of in parts]
        for role in names
    }


def grown(rounds: Sequence[Round]) -> list[Broken]:
    """Roles that hold much more in the second half of a soak than in the first; a short soak is
    too short to tell."""
    found = []
    for role, (first, second) in growth(rounds).items() if len(rounds) >= MIN_ROUNDS else ():
        if second[0] > 1.5 * first[0] + SLACK_MIB:
            found.append(Broken("I10", f"{role} grew from {first[0]} to {second[0]} MiB"))
        if second[1] > 1.5 * first[1] + SLACK_FILES:
            found.append(Broken("I10", f"{role} grew from {first[1]} to {second[1]} open files"))
    return found

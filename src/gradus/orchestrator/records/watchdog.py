"""Reports what waits for what when nothing moves, so that no run hangs in silence.

Each loop writes on the board what it waits for, and who must act. The chain of waits ends outside
the orchestrator, at the trainer, inference or an environment: that is where to look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gradus.errors import StallError
from gradus.gate import current_task
from gradus.log import get_logger

NUM_EPISODES_SHOWN = 5
LOOK_SECONDS = 60.0
LATE_SECONDS = 30.0
"""By as much more than it asked for, only a process that did not run sleeps."""
FIRST_LOOPS = ("ship", "refresh")
"""Where a chain of waits begins: a run exists to send batches and to serve versions."""

log = get_logger(__name__)


@dataclass(frozen=True)
class WaitFor:
    """What a loop waits for, and who must act."""

    what: str
    on: str
    """Another loop by its name, or something outside the orchestrator."""


@dataclass(frozen=True)
class Wait:
    """A loop that waits."""

    loop: str
    target: WaitFor
    seconds: float

    @property
    def text(self) -> str:
        return f"{self.loop} waits {self.seconds:.0f} s for {self.target.what} ({self.target.on})"


class WaitBoard:
    """Owns what each loop waits for, and when anything moved last.

    >>> board = WaitBoard(clock=lambda: 0.0)
    >>> with board.waiting("ship", WaitFor("a full batch", on="collect")):
    ...     board.waits()[0].text
    'ship waits 0 s for a full batch (collect)'
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        """The task of every loop that waited once."""
        self._clock = clock
        self._waits: dict[str, tuple[Callable[[], WaitFor], float]] = {}
        self._moved_at = clock()

    @contextmanager
    def waiting(
        self, loop: str, target: WaitFor | Callable[[], WaitFor], *, is_progress: bool = True
    ) -> Iterator[None]:
        """The body is a wait of `loop`; its end counts as movement if `is_progress`.

        A `target` that depends on the moment is a function, asked when a report is made.
        """
        ask = target if callable(target) else lambda: target
        self._waits[loop] = (ask, self._clock())
        task = current_task()
        if task is not None:
            self.tasks[loop] = task
        try:
            yield
        finally:
            del self._waits[loop]
        if is_progress:
            self.moved()

    def moved(self) -> None:
        self._moved_at = self._clock()

    async def rest(self, seconds: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Sleep; a time in which this process did not run, as in a frozen container or on a laptop
        that slept, is no time in which anything could have moved."""
        while seconds > 0:
            part = min(seconds, LOOK_SECONDS)
            until = self._clock() + part
            await sleep(part)
            late = self._clock() - until
            if late > LATE_SECONDS:
                self._moved_at += late
            seconds -= part

    @property
    def quiet_seconds(self) -> float:
        """Since the last progress."""
        return self._clock() - self._moved_at

    def waits(self) -> list[Wait]:
        """What every loop waits for now."""
        now = self._clock()
        return [Wait(loop, ask(), now - since) for loop, (ask, since) in self._waits.items()]


def chain_of(waits: Mapping[str, Wait], first: str) -> list[Wait]:
    """The waits from loop `first` on, each on the next one's loop; stops before a repetition."""
    chain: list[Wait] = []
    loop = first
    while loop in waits and all(wait.loop != loop for wait in chain):
        chain.append(waits[loop])
        loop = waits[loop].target.on
    return chain


def describe_chain(waits: list[Wait]) -> str:
    """One line: from a loop that should act to what it waits for in the end."""
    by_loop = {wait.loop: wait for wait in waits}
    first = next((loop for loop in FIRST_LOOPS if loop in by_loop), None)
    if first is None:
        return "no loop waits at a known point; see the stacks"
    chain = chain_of(by_loop, first)
    last = chain[-1].target.on
    steps = " -> ".join(f"{wait.loop} (for {wait.target.what})" for wait in chain)
    if last in by_loop:
        return f"{steps} -> {last}: they wait for each other"
    return f"{steps} -> {last}"


@dataclass
class Watchdog:
    """Owns the deadline of the whole run."""

    board: WaitBoard
    stall_seconds: float
    oldest: Callable[[], list[str]]
    """Describes the episodes in flight, oldest first."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        """StallError with a report once nothing moved for `stall_seconds`.

        waits for: the earliest moment at which the run can count as stalled
        unblocked by: time
        """
        while (quiet := self.board.quiet_seconds) < self.stall_seconds:
            await self.board.rest(self.stall_seconds - quiet, self.sleep)
        log.warning("%s", self.report())
        raise StallError(
            f"nothing moved for {quiet:.0f} s: {describe_chain(self.board.waits())}; the log shows "
            "stacks and episodes; orchestrator.stall_seconds is the limit"
        )

    def report(self) -> str:
        """The chain of waits, every loop, its stack, and the oldest episodes."""
        waits = self.board.waits()
        waiting = {wait.loop for wait in waits}
        episodes = self.oldest()
        lines = [
            f"nothing moved for {self.board.quiet_seconds:.0f} s",
            f"chain: {describe_chain(waits)}",
            *(f"  {wait.text}" for wait in waits),
            *(f"  {loop} is at no known wait" for loop in self.board.tasks if loop not in waiting),
            f"episodes in flight: {len(episodes)}, the oldest:",
            *(f"  {text}" for text in episodes[:NUM_EPISODES_SHOWN]),
            "stacks:",
        ]
        for loop, task in self.board.tasks.items():
            lines.append(f"  {loop}:")
            lines += [f"    {frame}" for frame in stack_of(task)]
        return "\n".join(lines)


def stack_of(task: asyncio.Task[Any]) -> list[str]:
    """Every suspended frame of a task, outermost first; `Task.get_stack` gives only one."""
    if task.done():
        return ["ended"]
    frames = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            break
        code = frame.f_code
        frames.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames

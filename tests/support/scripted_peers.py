"""A scripted environment, policy and trainer: the orchestrator's peers inside one event loop.

They fit the orchestrator's protocols without importing it, wait only where a test tells them to,
and remember what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode

from gradus.run.checkpoints import CheckpointStore
from gradus.testing.episodes import build_episode
from gradus.wire.events import (
    CheckpointStaged,
    Event,
    PolicyPublished,
    StepFinished,
    TrainerDone,
)
from gradus.wire.inference import EngineStatus
from gradus.wire.micro_batch import Batch


async def at_once(_: int) -> None:
    """The shortest wait: everyone else gets a turn."""
    await asyncio.sleep(0)


@dataclass(frozen=True)
class ScriptedTask:
    """A task that says only its index."""

    task_data: dict[str, Any]
    key: str | int


@dataclass(frozen=True)
class ScriptedInfo:
    """What a scripted environment offers."""

    num_tasks: int | None
    taskset: str = "words"


@dataclass
class Call:
    """One episode that an environment was asked for."""

    number: int
    index: int
    version: int
    outcome: str = "running"
    seed: int | None = None


class ScriptedEnvironment:
    """Plays episode number n (counted from 0) as `play(n)` says, after `wait(n)`.

    >>> environment = ScriptedEnvironment(play=lambda number: build_episode(reward=number % 2))
    """

    def __init__(
        self,
        *,
        play: Callable[[int], WireEpisode | Exception] | None = None,
        wait: Callable[[int], Awaitable[None]] = at_once,
        num_tasks: int | None = 100,
        refused: Mapping[int, Exception] | None = None,
    ) -> None:
        """By default every second episode of a group is rewarded; `refused` says what is raised
        when a task is asked for."""
        self._refused = refused or {}
        self.calls: list[Call] = []
        self._play = play or (lambda number: build_episode(reward=float(number % 2), seed=number))
        self._wait = wait
        self._num_tasks = num_tasks
        self._failure: asyncio.Future[None] | None = None
        self._death: Exception | None = None

    async def info(self) -> ScriptedInfo:
        """The size that the test chose."""
        return ScriptedInfo(self._num_tasks)

    async def task(self, index: int) -> ScriptedTask:
        """Any index is a task, unless it is `refused`; the key is an integer."""
        if index in self._refused:
            raise self._refused[index]
        return ScriptedTask({"idx": index}, index)

    async def run(
        self, task: ScriptedTask, *, version: int, seed: int | None = None
    ) -> WireEpisode:
        """Wait, then play; an exception that the script returns is raised."""
        call = Call(len(self.calls), task.task_data["idx"], version, seed=seed)
        self.calls.append(call)
        try:
            await self._wait(call.number)
        except asyncio.CancelledError:
            call.outcome = "cancelled"
            raise
        call.outcome = "ended"
        result = self._play(call.number)
        if isinstance(result, Exception):
            raise result
        return result

    async def watch(self) -> None:
        """Waits until `die`."""
        self._failure = asyncio.get_running_loop().create_future()
        if self._death is not None:
            self._failure.set_exception(self._death)
        await self._failure

    def die(self, error: Exception) -> None:
        """End `watch` with `error`, as a lost process does."""
        self._death = error
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True)
class ScriptedApply:
    """A version went live."""

    version: int
    apply_seconds: float
    pause_seconds: float
    status: EngineStatus


class ScriptedPolicy:
    """Serves every published version after `wait(version)`."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, *, wait: Callable[[int], Awaitable[None]] = at_once) -> None:
        self.version = 0
        self.newest_version = 0
        self.kv_capacity_tokens = 0
        self.load: dict[str, Any] = {}
        """What status tells instead of an idle engine, e.g. {"kv_usage": 0.95}."""
        self.num_served_again = 0
        self._wait = wait

    async def apply(self, published: PolicyPublished) -> ScriptedApply:
        """100 more tokens were generated since the last version."""
        self.newest_version = published.version
        await self._wait(published.version)
        self.version = published.version
        return ScriptedApply(self.version, 0.25, 0.125, await self.status())

    async def status(self) -> EngineStatus:
        """An engine that has answered everything, unless `load` says otherwise."""
        status = EngineStatus(
            version=self.version,
            term=1,
            running=0,
            waiting=0,
            kv_usage=0.0,
            preemptions=0,
            prompt_tokens=0,
            generated_tokens=100 * self.version,
            is_paused=False,
        )
        return msgspec.structs.replace(status, **self.load)

    def addresses(self) -> list[str]:
        return [self.base_url]

    async def serve_initial(self) -> None:
        """It serves them."""

    async def serve_again(self) -> EngineStatus:
        """As a new server does that was told so."""
        self.num_served_again += 1
        return await self.status()

    async def close(self) -> None:
        """Nothing is held open."""


class ScriptedTrainer:
    """Both ends of a transport, and a trainer that trains step n after `wait(n)`.

    Start `train` next to the orchestrator; it ends after `max_steps` batches.
    """

    def __init__(
        self,
        *,
        max_steps: int,
        term: int = 1,
        wait: Callable[[int], Awaitable[None]] = at_once,
        is_published_first: bool = False,
        first_step: int = 0,
        checkpoints: CheckpointStore | None = None,
        checkpoint_interval: int = 1,
    ) -> None:
        """With `checkpoints` it stages its part; a resume begins at `first_step`."""
        self.batches: list[Batch] = []
        self._max_steps = max_steps
        self._term = term
        self._wait = wait
        self._is_published_first = is_published_first
        self._first_step = first_step
        self._checkpoints = checkpoints
        self._interval = checkpoint_interval
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._arrived: asyncio.Queue[Batch | None] = asyncio.Queue()

    async def train(self) -> None:
        """Train and publish batch after batch."""
        if self._first_step:
            self._events.put_nowait(self._published(self._first_step))
        for step in range(self._first_step, self._max_steps):
            batch = await self._arrived.get()
            if batch is None:
                self._end_early(step)
                return
            assert batch.step == step, f"batch {batch.step} came instead of {step}"
            await self._wait(step)
            finished = StepFinished(
                step, self._term, {"loss/total/mean": float(step)}, self._is_saved(step + 1)
            )
            both: list[Event] = [finished, self._published(step + 1)]
            for event in reversed(both) if self._is_published_first else both:
                self._events.put_nowait(event)
            self._stage(step + 1)
        self._events.put_nowait(TrainerDone(self._max_steps - 1, self._term))

    def _end_early(self, version: int) -> None:
        if version > self._first_step and not self._is_saved(version):
            self._stage(version, is_last=True)
        self._events.put_nowait(TrainerDone(version - 1, self._term))

    def _published(self, version: int) -> PolicyPublished:
        return PolicyPublished(version, self._term, f"version_{version}", "digest")

    def _is_saved(self, version: int) -> bool:
        is_due = version % self._interval == 0 or version == self._max_steps
        return self._checkpoints is not None and is_due

    def _stage(self, version: int, *, is_last: bool = False) -> None:
        if self._checkpoints is None or not (is_last or self._is_saved(version)):
            return
        part = self._checkpoints.staging(version) / "trainer"
        part.mkdir()
        (part / "weights").write_text(str(version))
        self._events.put_nowait(CheckpointStaged(version, self._term))

    def say(self, event: Event) -> None:
        """Send any event, also one that makes no sense."""
        self._events.put_nowait(event)

    async def send(self, batch: Batch) -> None:
        """There is always room."""
        self.batches.append(batch)
        self._arrived.put_nowait(batch)

    async def end(self, step: int) -> None:
        """No batch from `step` on, which is the next one."""
        assert step == self._first_step + len(self.batches), f"the batches do not end at {step}"
        self._arrived.put_nowait(None)

    async def forget(self, step: int) -> None:
        """Nothing is on disk."""

    @property
    def last_handled(self) -> int:
        """Events are told once."""
        return -1

    async def forget_events(self, last: int) -> None:
        """They are kept nowhere."""

    async def receive_event(self) -> Event:
        """The trainer's next event."""
        return await self._events.get()

    async def close(self) -> None:
        """Nothing is held open."""

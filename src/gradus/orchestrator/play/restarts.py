"""An environment whose process may be restarted: its episodes fail as lost, other requests wait.
After a loss for want of memory half as many episodes are played there at once.

A task that ends its process each time would use up all restarts; `CrashAttribution` finds it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from verifiers.v1.episode import WireEpisode

from gradus.config import EvaluationSourceConfig, SourceConfig
from gradus.errors import DeadlineError, EnvironmentFailure, ProcessError
from gradus.log import get_logger
from gradus.orchestrator.play.environment import (
    ConnectionLost,
    EnvironmentAddress,
    EnvironmentClient,
    EpisodeSettings,
    TaskRefused,
)
from gradus.orchestrator.types import EpisodeFailed, Failure, Task, TaskPointer
from gradus.processes.table import memory_kills, read_process
from gradus.wire.episode import FROM_OUTSIDE, LOST, NO_MEMORY, TaskSetInfo

LOSSES_TO_BLAME = 2
"""The task of an episode that was playing at this many losses of its process is set aside. A loss
counts half where somebody else ended the process, such as the kernel that had no memory left."""
LOOK_SECONDS = 0.2
"""Between two looks for the ready file of the new process."""
TOLD_SECONDS = 5.0
"""Until the launcher has said how a process ended."""

log = get_logger(__name__)


class RestartedEnvironment:
    """Owns the client of the process that lives now, and waits for the next one when it ends.

    Running episodes fail as "EnvironmentLost", which the error policy plays again by default; other
    requests wait. The launcher decides how often a process is restarted.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], EnvironmentAddress],
        connect: Callable[[EnvironmentAddress], EnvironmentClient],
        *,
        seconds: float,
        tell: Callable[[str], None] = log.warning,
        was_killed: Callable[[int], bool | None] = lambda _: False,
    ) -> None:
        """`find` reads where the process listens, ProcessError while none does; `seconds` is how
        long a new process may take; `tell` gets a line when fewer episodes are played;
        `was_killed` says whether somebody else ended a process, None while nobody knows."""
        self._name = name
        self._find = find
        self._connect = connect
        self._seconds = seconds
        self._address = find()
        self._client = connect(self._address)
        self._info: TaskSetInfo | None = None
        self._num_lost = 0
        self._connected = asyncio.Event()
        self._connected.set()
        self._tell = tell
        self._was_killed = was_killed
        self._num_playing = 0
        self._most: int | None = None
        """Episodes at once; None until memory ran out."""
        self._left = asyncio.Condition()
        self._memory_kills = memory_kills()

    @property
    def answers(self) -> bool:
        """Whether a process lives whose event loop runs."""
        return self._connected.is_set() and self._client.answers

    async def info(self) -> TaskSetInfo:
        """How many tasks there are; the same after every restart."""
        self._info = await self._client.info()
        return self._info

    async def task(self, index: int) -> Task:
        """One task, from whichever process lives; TaskRefused when it ends one after the other."""
        num_lost = blamed = 0.0
        while True:
            await self._connected.wait()
            try:
                return await self._client.task(index)
            except DeadlineError:
                log.warning("%r answers nothing; task %d is asked for again", self._name, index)
            except ConnectionLost as lost:
                num_lost += 1
                blamed += _weight(str(lost))
                if blamed >= LOSSES_TO_BLAME:
                    raise TaskRefused(
                        f"environment {self._name!r} was lost {num_lost:.0f} times while it loaded "
                        f"task {index}: {lost}"
                    ) from lost

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> WireEpisode:
        """Play one episode, once a process lives and has room for it."""
        async with self._place():
            await self._connected.wait()
            try:
                return await self._client.run(task, version=version, seed=seed)
            except EpisodeFailed as failed:
                if failed.failure.kind == LOST and NO_MEMORY in failed.failure.message:
                    self._play_fewer()
                raise

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        async with self._left:
            await self._left.wait_for(lambda: self._most is None or self._num_playing < self._most)
            self._num_playing += 1
        try:
            yield
        finally:
            self._num_playing -= 1
            async with self._left:
                # One alone might be cancelled as it is told.
                self._left.notify_all()

    def _play_fewer(self) -> None:
        """Once: who starts with half as many and has no memory for them needs another machine."""
        if self._most is None:
            self._most = max(1, self._num_playing // 2)
            self._tell(
                f"source {self._name!r}: {NO_MEMORY} for a process of it; at most {self._most} of "
                f"its episodes are played at once from now on, where {self._num_playing} were"
            )

    def _has_run_out_of_memory(self) -> bool:
        before, self._memory_kills = self._memory_kills, memory_kills()
        return before is not None and (self._memory_kills or 0) > before

    async def watch(self) -> None:
        """Never returns; EnvironmentFailure when no new process comes, or it has other tasks.

        waits for: the end of the process      unblocked by: the kernel, time
        """
        while True:
            reason = "ended"
            try:
                await self._client.watch()
            except* EnvironmentFailure as failures:
                reason = str(failures.exceptions[0])
            await self._replace(reason)

    async def close(self) -> None:
        await self._client.close()

    async def _replace(self, reason: str) -> None:
        self._connected.clear()
        self._num_lost += 1
        if self._has_run_out_of_memory():
            reason += f", killed {FROM_OUTSIDE}: {NO_MEMORY}"
            self._play_fewer()
        elif await self._is_told_of_a_kill():
            reason += f"; it was killed {FROM_OUTSIDE}"
        log.warning("%s; waiting for a new process of %r", reason, self._name)
        lost = self._client
        # `CrashAttribution` tells losses apart by this number.
        lost.lose(f"{reason} (loss {self._num_lost} of this launch)")
        self._address = await self._next_address(reason)
        self._client = self._connect(self._address)
        await lost.close()
        info = await self._client.info()
        if self._info is not None and info != self._info:
            raise EnvironmentFailure(
                f"environment {self._name!r} came back with other tasks: {info}, before "
                f"{self._info}; its data changed while the run went on"
            )
        log.info("environment %r plays again (pid %s)", self._name, self._address.pid)
        self._connected.set()

    async def _is_told_of_a_kill(self) -> bool:
        """The launcher, whose child it was, knows soon, or never where it ended too."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_SECONDS):
                while (was_killed := self._was_killed(self._address.pid or 0)) is None:
                    await asyncio.sleep(LOOK_SECONDS / 4)
                return was_killed
        return False

    async def _next_address(self, reason: str) -> EnvironmentAddress:
        try:
            async with asyncio.timeout(self._seconds):
                while (address := self._look()) is None:
                    await asyncio.sleep(LOOK_SECONDS)
                return address
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"{reason}; no new process was ready in {self._seconds:g} s"
            ) from error

    def _look(self) -> EnvironmentAddress | None:
        try:
            address = self._find()
        except ProcessError:
            return None
        return None if address == self._address else address


async def connect_environment(
    find: Callable[[], EnvironmentAddress],
    source: SourceConfig | EvaluationSourceConfig,
    settings: EpisodeSettings,
    *,
    restart_seconds: float,
    tell: Callable[[str], None],
    was_killed: Callable[[int], bool | None],
) -> EnvironmentClient | RestartedEnvironment:
    """The client of a source, which follows its process where the launcher restarts it.

    `find` reads where the process listens; `restart_seconds` is how long a new one may take, 0
    means that none comes. `tell` and `was_killed` are those of RestartedEnvironment.
    """
    connect = partial(EnvironmentClient, source.name, settings=settings)
    if source.address is not None or not restart_seconds:
        return connect(find())
    with suppress(TimeoutError):
        async with asyncio.timeout(restart_seconds):
            # What ended an orchestrator before this one may have ended the process too.
            while not _lives(find):
                await asyncio.sleep(LOOK_SECONDS)
    seconds = restart_seconds
    return RestartedEnvironment(
        source.name, find, connect, seconds=seconds, tell=tell, was_killed=was_killed
    )


def _lives(find: Callable[[], EnvironmentAddress]) -> bool:
    try:
        pid = find().pid
    except ProcessError:
        return False
    return pid is None or read_process(pid) is not None


def _weight(reason: str) -> float:
    """How much a loss counts against what was played."""
    return 0.5 if FROM_OUTSIDE in reason else 1.0


class CrashAttribution:
    """Owns which episodes were played when their process was lost, and finds who did it.

    After a loss every episode that the process played is a suspect, unless the loss came from
    outside and is its first. The suspects of a source play task after task, beside episodes that
    are none. The task that plays when its process is lost again is set aside; an episode that ends
    in any other way is cleared. What another process played meanwhile proves nothing: the same
    episode comes again with the same seed.

    >>> blame = CrashAttribution.without_journal()  # doctest: +SKIP
    >>> async with blame.playing(pointer, "g000003.1"):  # doctest: +SKIP
    ...     episode = await environment.run(task, version=3)
    """

    def __init__(
        self,
        *,
        is_set_aside: Callable[[TaskPointer], bool],
        set_aside: Callable[[TaskPointer, str, str], None],
    ) -> None:
        """`set_aside` gets the task, why in one word, and the reason of the last loss."""
        self.is_set_aside = is_set_aside
        """Whether a task was set aside, so that its failures are final."""
        self._set_aside = set_aside
        self._losses: dict[str, dict[str, float]] = {}
        """Episode → the losses at which it was played, and how much each counts."""
        self._playing: dict[str, Counter[int]] = {}
        """Source → the suspect that plays, and how many of its episodes do."""
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def playing(self, task: TaskPointer, episode_id: str) -> AsyncIterator[None]:
        """Hold this while an episode of `task` is played; EpisodeFailed when it was set aside.

        waits for: other suspects of the source      unblocked by: the end of their episodes
        """
        if self._num_losses(episode_id) < 1:
            self._refuse_if_set_aside(task)
            yield
            return
        playing = self._playing.setdefault(task.source, Counter())
        async with self._left:
            await self._left.wait_for(lambda: not playing or task.index in playing)
        playing[task.index] += 1
        try:
            self._refuse_if_set_aside(task)
            yield
        finally:
            playing[task.index] -= 1
            if not playing[task.index]:
                del playing[task.index]
                async with self._left:
                    self._left.notify_all()

    def note_failure(self, task: TaskPointer, episode_id: str, failure: Failure) -> None:
        """An episode of `task` failed."""
        if failure.kind != LOST:
            self.clear(episode_id)
            return
        self._losses.setdefault(episode_id, {})[failure.message] = _weight(failure.message)
        if self._num_losses(episode_id) >= LOSSES_TO_BLAME:
            self._set_aside(task, "lost", failure.message)

    def clear(self, episode_id: str) -> None:
        self._losses.pop(episode_id, None)

    def _num_losses(self, episode_id: str) -> float:
        return sum(self._losses.get(episode_id, {}).values())

    @classmethod
    def without_journal(cls) -> CrashAttribution:
        """One that remembers the tasks itself, for evaluations, which have no journal."""
        aside: set[tuple[str, int]] = set()

        def set_aside(task: TaskPointer, reason: str, error: str) -> None:
            aside.add((task.source, task.index))
            log.warning(
                "task %d of %r is set aside: %s, %s", task.index, task.source, reason, error
            )

        return cls(
            is_set_aside=lambda task: (task.source, task.index) in aside, set_aside=set_aside
        )

    def _refuse_if_set_aside(self, task: TaskPointer) -> None:
        if self.is_set_aside(task):
            text = f"task {task.index} was set aside, see task_set_aside in journal.jsonl"
            raise EpisodeFailed(Failure("task_set_aside", text))

"""The processes of one source: each episode goes to the one that plays the fewest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

from verifiers.v1.episode import WireEpisode

from gradus.config import EvaluationSourceConfig, SourceConfig
from gradus.errors import EnvironmentFailure
from gradus.orchestrator.play.environment import Environment, EnvironmentAddress, EpisodeSettings
from gradus.orchestrator.play.restarts import connect_environment
from gradus.orchestrator.types import Task
from gradus.wire.episode import TaskSetInfo


class _Member(Environment, Protocol):
    @property
    def answers(self) -> bool:
        """Whether it would play an episode now."""


class SharedEnvironment:
    """Owns the clients of several processes that play the same environment.

    One that is being started again, or whose event loop is blocked, gets no episode while another
    can play it.
    """

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = members
        self._num_playing = [0] * len(members)

    async def info(self) -> TaskSetInfo:
        """What they offer; EnvironmentFailure where they do not offer the same."""
        first, *others = [await member.info() for member in self._members]
        for other in others:
            if other != first:
                raise EnvironmentFailure(
                    f"the processes of taskset {first.taskset!r} have other tasks, {first} and "
                    f"{other}; its data must not depend on which process loads it"
                )
        return first

    async def task(self, index: int) -> Task:
        return await self._members[self._freest()].task(index)

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> WireEpisode:
        """Play one episode where the fewest are played."""
        chosen = self._freest()
        self._num_playing[chosen] += 1
        try:
            return await self._members[chosen].run(task, version=version, seed=seed)
        finally:
            self._num_playing[chosen] -= 1

    async def watch(self) -> None:
        """Never returns; EnvironmentFailure when one of them is lost for good."""
        async with asyncio.TaskGroup() as watches:
            for member in self._members:
                watches.create_task(member.watch())

    async def close(self) -> None:
        async with AsyncExitStack() as closing:
            for member in self._members:
                closing.push_async_callback(member.close)

    def _freest(self) -> int:
        def load(number: int) -> tuple[bool, int]:
            return not self._members[number].answers, self._num_playing[number]

        return min(range(len(self._members)), key=load)


async def connect_source(
    find: Callable[..., EnvironmentAddress],
    source: SourceConfig | EvaluationSourceConfig,
    settings: EpisodeSettings,
    *,
    restart_seconds: float,
    tell: Callable[[str], None],
    was_killed: Callable[[int], bool | None],
) -> Environment:
    """The client of all processes of a source; `find` reads where the one of a `number` listens.

    The rest is that of `connect_environment`.
    """
    members = [
        await connect_environment(
            partial(find, number=number),
            source,
            settings,
            restart_seconds=restart_seconds,
            tell=tell,
            was_killed=was_killed,
        )
        for number in range(1 if source.address is not None else source.num_workers)
    ]
    return members[0] if len(members) == 1 else SharedEnvironment(members)

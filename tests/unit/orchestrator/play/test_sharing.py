"""Episodes of one source are shared by its processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gradus.errors import EnvironmentFailure
from gradus.orchestrator.play.sharing import SharedEnvironment
from gradus.orchestrator.types import Task
from gradus.wire.episode import TaskSetInfo

TASK = Task({"idx": 0}, "k")


class Member:
    """Plays until it is told to end."""

    def __init__(self, num_tasks: int = 5) -> None:
        self.answers = True
        self.num_playing = 0
        self.ended = asyncio.Event()
        self._num_tasks = num_tasks

    async def info(self) -> TaskSetInfo:
        return TaskSetInfo(num_tasks=self._num_tasks, taskset="words")

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> Any:
        self.num_playing += 1
        await self.ended.wait()
        self.num_playing -= 1


def members_of(*members: Member) -> SharedEnvironment:
    given: Any = members
    return SharedEnvironment(given)


async def play(environment: SharedEnvironment, number: int) -> list[asyncio.Task[Any]]:
    playing = [asyncio.create_task(environment.run(TASK, version=0)) for _ in range(number)]
    await asyncio.sleep(0)
    return playing


async def test_each_episode_goes_to_the_process_that_plays_the_fewest() -> None:
    first, second = Member(), Member()
    environment = members_of(first, second)
    playing = await play(environment, 4)
    assert (first.num_playing, second.num_playing) == (2, 2)
    second.ended.set()
    await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
    await play(environment, 1)
    assert first.num_playing == 2


@pytest.mark.shows("F08")
async def test_a_process_that_does_not_answer_gets_no_episode_until_it_does() -> None:
    silent, other = Member(), Member()
    environment = members_of(silent, other)
    silent.answers = False
    await play(environment, 3)
    assert (silent.num_playing, other.num_playing) == (0, 3)
    silent.answers = True
    await play(environment, 2)
    assert (silent.num_playing, other.num_playing) == (2, 3)


@pytest.mark.shows("F08")
async def test_with_nobody_to_play_them_episodes_wait_where_the_fewest_are() -> None:
    silent, other = Member(), Member()
    environment = members_of(silent, other)
    silent.answers = other.answers = False
    await play(environment, 2)
    assert (silent.num_playing, other.num_playing) == (1, 1)


async def test_processes_that_have_other_tasks_are_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="other tasks"):
        await members_of(Member(), Member(num_tasks=6)).info()

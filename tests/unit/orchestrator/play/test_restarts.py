"""A process that ends and comes back costs its episodes an attempt, and the run nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from commands import wait_until_async
from configs import build_run_config
from scripted_peers import ScriptedEnvironment
from verifiers.v1.episode import WireEpisode

from gradus.config import ErrorPolicyConfig, RunProcessConfig, resolve
from gradus.config.schema.environment import TrainEnvironmentConfig
from gradus.errors import EnvironmentFailure, ProcessError
from gradus.orchestrator.evaluation.episodes import (
    EvaluatedEpisode,
    EvaluationSource,
    play_episodes,
)
from gradus.orchestrator.failures import ErrorPolicy
from gradus.orchestrator.play import restarts
from gradus.orchestrator.play.environment import (
    ConnectionLost,
    EnvironmentAddress,
    TaskRefused,
    build_settings,
)
from gradus.orchestrator.play.restarts import (
    CrashAttribution,
    RestartedEnvironment,
    connect_environment,
)
from gradus.orchestrator.play.tasks import SourceShare, TaskSource
from gradus.orchestrator.types import EpisodeFailed, Failure, Task, TaskPointer
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode
from gradus.wire.episode import FROM_OUTSIDE, LOST, NO_MEMORY, TaskSetInfo


class FakeClient:
    """One life of an environment process: plays until it is told to end."""

    episode: WireEpisode | None = None
    """What it plays; a text that names the process where a test gives none."""
    mortal = frozenset({1})
    """Processes that answer nothing until they end."""

    def __init__(self, address: EnvironmentAddress, *, num_tasks: int = 5) -> None:
        self.address = address
        self.is_closed = False
        self.num_running = 0
        self.num_asked = 0
        self.died = asyncio.get_running_loop().create_future()
        self._lost = asyncio.get_running_loop().create_future()
        self._num_tasks = num_tasks

    async def info(self) -> TaskSetInfo:
        return TaskSetInfo(num_tasks=self._num_tasks, taskset="words")

    async def task(self, index: int) -> Task:
        self.num_asked += 1
        if self.address.pid in self.mortal:
            await self._wait(ConnectionLost("lost"))
        return Task({"idx": index}, index)

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> Any:
        self.num_running += 1
        if self.address.pid == 1:
            await self._wait(EpisodeFailed(Failure("EnvironmentLost", "lost")))
        return self.episode or f"episode of pid {self.address.pid}"

    async def _wait(self, error: Exception) -> None:
        await asyncio.shield(self._lost)
        raise error

    async def watch(self) -> None:
        await asyncio.shield(self.died)
        raise EnvironmentFailure("environment process 'words' (pid 1) ended")

    def lose(self, reason: str) -> None:
        self._lost.set_result(reason)

    async def close(self) -> None:
        self.is_closed = True


class Rig:
    """A process that can end, and come back under another pid."""

    def __init__(
        self,
        *,
        seconds: float = 60.0,
        later_tasks: int = 5,
        was_killed: Callable[[int], bool | None] = lambda _: False,
    ) -> None:
        self.pid: int | None = 1
        self.clients: list[FakeClient] = []
        self.later_tasks = later_tasks
        connect: Callable[..., Any] = self.connect
        self.environment = RestartedEnvironment(
            "words", self.find, connect, seconds=seconds, was_killed=was_killed
        )

    def find(self) -> EnvironmentAddress:
        if self.pid is None:
            raise ProcessError("not ready")
        return EnvironmentAddress("ipc://run", self.pid)

    def connect(self, address: EnvironmentAddress) -> FakeClient:
        num_tasks = self.later_tasks if self.clients else 5
        self.clients.append(FakeClient(address, num_tasks=num_tasks))
        return self.clients[-1]

    def die(self, *, next_pid: int | None) -> None:
        self.pid = next_pid
        self.clients[0].died.set_result(None)


TASK = Task({"idx": 0}, 0)


@pytest.mark.shows("F07")
async def test_running_episodes_fail_as_lost_and_the_next_ones_play_on_the_new_process() -> None:
    rig = Rig()
    await rig.environment.info()
    watching = asyncio.create_task(rig.environment.watch())
    playing = asyncio.create_task(rig.environment.run(TASK, version=0))
    await asyncio.sleep(0)
    rig.die(next_pid=2)
    with pytest.raises(EpisodeFailed) as caught:
        await playing
    assert caught.value.failure.kind == "EnvironmentLost"
    assert await rig.environment.run(TASK, version=0) == "episode of pid 2"
    assert rig.clients[0].is_closed
    watching.cancel()


@pytest.mark.shows("F07")
@pytest.mark.parametrize(
    ("said", "counts"), [([None, None, True], 0.5), ([None, False], 1.0), ([None], 1.0)]
)
async def test_a_process_that_somebody_killed_counts_half_against_what_it_played(
    said: list[bool | None], counts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher says how its child ended, a little later or never."""
    monkeypatch.setattr(restarts, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(restarts, "TOLD_SECONDS", 0.2)
    rig = Rig(was_killed=lambda pid: said.pop(0) if len(said) > 1 else said[0])
    lost: list[str] = []
    monkeypatch.setattr(FakeClient, "lose", lambda _, reason: lost.append(reason))
    watching = asyncio.create_task(rig.environment.watch())
    await asyncio.sleep(0)
    rig.die(next_pid=2)
    await wait_until_async(lambda: bool(lost))
    watching.cancel()
    blame = CrashAttribution.without_journal()
    blame.note_failure(TaskPointer("words", 0, 0), "g0.0", Failure(LOST, lost[0]))
    assert blame._num_losses("g0.0") == counts


class WorkersOf(FakeClient):
    """A process whose first worker is lost with all that it plays."""

    def __init__(self, address: EnvironmentAddress, *, num_tasks: int = 5) -> None:
        super().__init__(address, num_tasks=num_tasks)
        self.most = 0
        self.ended = asyncio.Event()
        self.worker_ended = asyncio.Event()

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> Any:
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        try:
            if not self.worker_ended.is_set():
                await self.worker_ended.wait()
                text = f"worker process 7 was killed by SIGKILL, {FROM_OUTSIDE}: {NO_MEMORY}"
                raise EpisodeFailed(Failure(LOST, text))
            await self.ended.wait()
        finally:
            self.num_running -= 1


@pytest.mark.shows("F14")
async def test_half_as_many_episodes_are_played_where_a_worker_had_no_memory() -> None:
    told: list[str] = []
    address = EnvironmentAddress("ipc://run", 1)
    client = WorkersOf(address)
    connect: Callable[..., Any] = lambda _: client  # noqa: E731
    environment = RestartedEnvironment(
        "words", lambda: address, connect, seconds=5, tell=told.append
    )

    async def play() -> None:
        while True:
            try:
                return await environment.run(TASK, version=0)
            except EpisodeFailed:
                client.most = 0

    playing = [asyncio.create_task(play()) for _ in range(8)]
    await wait_until_async(lambda: client.num_running == 8)
    client.worker_ended.set()
    await wait_until_async(lambda: client.num_running == 4)
    client.ended.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*playing)
    assert client.most == 4
    assert told == [
        f"source 'words': {NO_MEMORY} for a process of it; at most 4 of its episodes are played "
        "at once from now on, where 8 were"
    ]


async def test_the_next_episode_gets_a_place_that_a_cancelled_one_was_told_of() -> None:
    environment = Rig().environment
    environment._most = 1
    leaves = asyncio.Event()
    played: list[int] = []

    async def play(number: int) -> None:
        async with environment._place():
            played.append(number)
            await leaves.wait()
            # Before the next one wakes, and after it was told.
            asyncio.get_running_loop().call_soon(playing[1].cancel)

    playing = [asyncio.create_task(play(number)) for number in range(3)]
    await asyncio.sleep(0)
    leaves.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*playing, return_exceptions=True)
    assert played == [0, 2]


@pytest.mark.shows("F14")
@pytest.mark.parametrize(("kills", "are_fewer"), [((4, 5), True), ((4, 4), False)])
async def test_a_whole_process_that_had_no_memory_plays_fewer_too(
    monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int], are_fewer: bool
) -> None:
    seen = iter(kills)
    monkeypatch.setattr(restarts, "memory_kills", lambda: next(seen))
    rig = Rig()
    watching = asyncio.create_task(rig.environment.watch())
    playing = [asyncio.create_task(rig.environment.run(TASK, version=0)) for _ in range(6)]
    await wait_until_async(lambda: rig.clients[0].num_running == 6)
    rig.die(next_pid=2)
    await asyncio.gather(*playing, return_exceptions=True)
    assert rig.environment._most == (3 if are_fewer else None)
    watching.cancel()


async def test_a_task_that_was_asked_for_comes_from_the_new_process() -> None:
    rig = Rig()
    watching = asyncio.create_task(rig.environment.watch())
    asking = asyncio.create_task(rig.environment.task(3))
    await asyncio.sleep(0)
    rig.die(next_pid=2)
    assert (await asking).key == 3
    watching.cancel()


async def test_what_is_asked_while_no_process_lives_waits_for_the_next() -> None:
    rig = Rig()
    watching = asyncio.create_task(rig.environment.watch())
    await asyncio.sleep(0)
    rig.die(next_pid=None)
    await wait_until_async(lambda: rig.clients[0]._lost.done())
    playing = asyncio.create_task(rig.environment.run(TASK, version=0))
    await asyncio.sleep(0)
    assert not playing.done()
    rig.pid = 2
    assert await playing == "episode of pid 2"
    watching.cancel()


async def test_a_process_that_does_not_come_back_ends_the_run_with_the_first_reason() -> None:
    rig = Rig(seconds=0.05)
    watching = asyncio.create_task(rig.environment.watch())
    await asyncio.sleep(0)
    rig.die(next_pid=1)
    with pytest.raises(EnvironmentFailure, match=r"\(pid 1\) ended; no new process.*0\.05 s"):
        await watching


async def test_a_process_that_comes_back_with_other_tasks_ends_the_run() -> None:
    rig = Rig(later_tasks=7)
    await rig.environment.info()
    watching = asyncio.create_task(rig.environment.watch())
    await asyncio.sleep(0)
    rig.die(next_pid=2)
    with pytest.raises(EnvironmentFailure, match="came back with other tasks"):
        await watching


def test_without_restarts_of_the_launcher_nobody_waits_for_a_new_process(tmp_path: Any) -> None:
    def resolved(restarts: int) -> RunProcessConfig:
        config = build_run_config({"launch": {"environment_restarts": restarts}})
        launched = resolve(config, run_dir=RunDirectory(tmp_path).root, term=1).launched
        assert isinstance(launched, RunProcessConfig)
        return launched

    assert resolved(0).environment_restart_seconds == 0
    assert resolved(3).environment_restart_seconds == 600
    lost = TrainEnvironmentConfig.model_validate({"id": "words"}).errors.retry_on
    assert "EnvironmentLost" in lost


async def test_an_evaluation_plays_what_was_lost_again_on_the_new_process() -> None:
    class Playing(FakeClient):
        episode = build_episode(reward=1.0)

        async def task(self, index: int) -> Task:
            return Task({"idx": index}, index)

    clients: list[Playing] = []

    def connect(address: EnvironmentAddress) -> Any:
        clients.append(Playing(address))
        return clients[-1]

    pid = 1
    environment = RestartedEnvironment(
        "words", lambda: EnvironmentAddress("ipc://run", pid), connect, seconds=60
    )
    again = ErrorPolicy(ErrorPolicyConfig(retries=1, backoff_seconds=0.0))
    source = EvaluationSource("words", 1, 2, environment, errors=again)
    ended: list[EvaluatedEpisode] = []
    watching = asyncio.create_task(environment.watch())
    playing = asyncio.create_task(
        play_episodes(
            [source], source.episode_keys(), version=3, max_in_flight=2, on_end=ended.append
        )
    )
    await wait_until_async(lambda: clients[0].num_running == 2)
    pid = 2
    clients[0].died.set_result(None)
    await playing
    assert [(e.attempts, e.score().reward) for e in ended] == [(2, 1.0), (2, 1.0)]
    watching.cancel()


@pytest.mark.shows("F07")
@pytest.mark.parametrize(
    ("address", "seconds", "follows"),
    [(None, 9.0, True), (None, 0.0, False), ("tcp://x", 9.0, False)],
)
async def test_a_client_follows_the_process_that_the_launcher_starts_anew(
    address: str | None, seconds: float, follows: bool, tmp_path: Any
) -> None:
    config = build_run_config({"orchestrator": {"eval": {"env": [{"id": "words"}]}}})
    resolved = resolve(config, run_dir=tmp_path, term=1).launched
    source = resolved.evaluation_sources[0].model_copy(update={"address": address})
    client = await connect_environment(
        lambda: EnvironmentAddress("ipc:///tmp/run", 1),
        source,
        build_settings(source, config.model, "http://x"),
        restart_seconds=seconds,
        tell=print,
        was_killed=lambda _: False,
    )
    assert isinstance(client, RestartedEnvironment) == follows
    await client.close()


@pytest.mark.shows("F05", "F07")
async def test_a_process_that_ended_together_with_the_orchestrator_is_waited_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "LOOK_SECONDS", 0.0)
    config = build_run_config({"orchestrator": {"eval": {"env": [{"id": "words"}]}}})
    source = resolve(config, run_dir=tmp_path, term=1).launched.evaluation_sources[0]
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # the launcher has not looked yet
    found = iter([ended.pid, None, os.getpid()])

    def find() -> EnvironmentAddress:
        if (pid := next(found, os.getpid())) is None:
            raise ProcessError("not ready")
        return EnvironmentAddress("ipc:///tmp/run", pid)

    settings = build_settings(source, config.model, "http://x")
    client = await connect_environment(
        find,
        source,
        settings,
        restart_seconds=60.0,
        tell=print,
        was_killed=lambda _: False,
    )
    assert isinstance(client, RestartedEnvironment)
    assert client._address.pid == os.getpid()
    await client.close()
    ended.wait()


class MortalEnvironment(ScriptedEnvironment):
    """Every episode of task `killer` ends the process, and all that it plays is lost."""

    def __init__(self, killer: int) -> None:
        super().__init__()
        self.num_lost = 0
        self._killer = killer
        self._playing: set[asyncio.Future[None]] = set()

    async def run(self, task: Any, *, version: int, seed: int | None = None) -> WireEpisode:
        lost = asyncio.get_running_loop().create_future()
        self._playing.add(lost)
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            if task.task_data["idx"] == self._killer and not lost.done():
                self._end()
            if lost.done():
                raise EpisodeFailed(Failure("EnvironmentLost", f"loss {self.num_lost}"))
        finally:
            self._playing.discard(lost)
        return await super().run(task, version=version, seed=seed)

    def _end(self) -> None:
        self.num_lost += 1
        for lost in self._playing:
            if not lost.done():
                lost.set_result(None)


@pytest.mark.shows("F07")
async def test_the_task_that_ends_its_process_is_found_among_others_and_set_aside(
    build_rig: Any,
) -> None:
    stream = TaskSource([SourceShare("words", 1.0, 100)], seed=0)
    killer = [stream.next_task().index for _ in range(3)][2]
    environment = MortalEnvironment(killer)
    rig = build_rig(max_steps=3, max_lag=2, environment=environment, errors={"retries": 2})
    await rig.play()
    assert environment.num_lost == 2
    asides = rig.events("task_set_aside")
    assert [(line["index"], line["reason"]) for line in asides] == [(killer, "lost")]
    assert sum(m.get("task/words/set_aside/lost/sum", 0) for _, m in rig.monitor.records) == 1
    failed = [line["error"] for line in rig.events("episode_ended") if line["error"]]
    assert set(failed) <= {"EnvironmentLost", "task_set_aside"}


def blame_of(aside: list[int]) -> CrashAttribution:
    return CrashAttribution(
        is_set_aside=lambda task: task.index in aside,
        set_aside=lambda task, *_: aside.append(task.index),
    )


async def test_suspects_play_one_after_the_other_and_an_end_clears_them() -> None:
    aside: list[int] = []
    blame = blame_of(aside)
    first, second = TaskPointer("words", 0, 1), TaskPointer("words", 0, 2)
    for task, episode in ((first, "a"), (first, "c"), (second, "b")):
        blame.note_failure(task, episode, Failure("EnvironmentLost", "loss 1"))
    entered = asyncio.Event()

    async def play() -> None:
        async with blame.playing(second, "b"):
            entered.set()

    async with blame.playing(first, "a"), blame.playing(first, "c"):
        waiting = asyncio.create_task(play())
        await asyncio.sleep(0)
        assert not entered.is_set()
    await waiting
    blame.clear("b")
    blame.clear("c")
    blame.note_failure(second, "b", Failure("EnvironmentLost", "loss 2"))
    assert aside == []
    blame.note_failure(first, "a", Failure("EnvironmentLost", "loss 2"))
    assert aside == [1]
    with pytest.raises(EpisodeFailed, match="aside"):
        async with blame.playing(first, "a"):
            pass


async def test_a_loss_from_outside_counts_half_and_makes_no_suspect_at_first() -> None:
    aside: list[int] = []
    blame = blame_of(aside)
    first, second = TaskPointer("words", 0, 1), TaskPointer("words", 0, 2)

    def lose(number: int) -> None:
        lost = Failure("EnvironmentLost", f"worker {number} was killed {FROM_OUTSIDE}")
        for task, episode in ((first, "a"), (second, "b")):
            blame.note_failure(task, episode, lost)

    lose(1)
    async with blame.playing(first, "a"), blame.playing(second, "b"):
        lose(2)
    async with blame.playing(first, "a"):
        waiting = asyncio.create_task(blame.playing(second, "b").__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    lose(3)
    assert aside == []
    lose(4)
    assert aside == [1, 2]


async def test_a_task_that_ends_each_process_that_loads_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeClient, "mortal", frozenset({1, 2}))
    rig = Rig()
    watching = asyncio.create_task(rig.environment.watch())
    asking = asyncio.create_task(rig.environment.task(3))
    for pid in (1, 2):
        await wait_until_async(lambda pid=pid: sum(c.num_asked for c in rig.clients) == pid)
        rig.pid = pid + 1
        rig.clients[-1].died.set_result(None)
    with pytest.raises(TaskRefused, match="was lost 2 times while it loaded task 3"):
        await asking
    watching.cancel()


async def test_an_evaluated_task_that_ends_its_process_is_set_aside_for_good() -> None:
    environment = MortalEnvironment(killer=2)
    again = ErrorPolicy(ErrorPolicyConfig(retries=2, backoff_seconds=0.0))
    source = EvaluationSource("words", 6, 2, environment, errors=again)
    blame = CrashAttribution.without_journal()
    for _ in range(2):
        ended: list[EvaluatedEpisode] = []
        await play_episodes(
            [source],
            source.episode_keys(),
            version=0,
            max_in_flight=12,
            on_end=ended.append,
            blame=blame,
        )
        assert {e.key.task for e in ended if e.failure is not None} == {2}
        assert len(ended) == 12
    assert environment.num_lost == 2

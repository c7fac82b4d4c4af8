"""An orchestrator that dies at any point is continued in its term; the trainer notices nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from commands import records, wait_until_async
from mishaps import FailureProfile
from scripted_peers import ScriptedEnvironment, ScriptedPolicy
from verifiers.v1.episode import WireEpisode

from gradus.config import CheckpointConfig
from gradus.errors import ProtocolError
from gradus.files import write_json
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.records.journal import Journal, JournalEvent, check_journal, surviving
from gradus.orchestrator.records.recording import PlayedState, save_played
from gradus.orchestrator.records.watchdog import WaitBoard
from gradus.orchestrator.resume import snapshot
from gradus.orchestrator.resume.standing import Standing, find_standing
from gradus.orchestrator.types import PlayedEpisode
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records
from gradus.transport import SpoolReceiver, SpoolSender
from gradus.transport.spool import name_of_batch
from gradus.wire.codec import decode
from gradus.wire.events import (
    CheckpointStaged,
    PolicyPublished,
    StepFinished,
    TrainerDone,
)

MAX_STEPS = 4


class Killed(BaseException):
    """The process is gone."""


class PlaysBySeed(ScriptedEnvironment):
    """The same episode for the same seed."""

    async def run(self, task: Any, *, version: int, seed: int | None = None) -> WireEpisode:
        await super().run(task, version=version, seed=seed)
        assert seed is not None
        return FailureProfile(share=0.2).play(seed)


def stands_at(run_dir: RunDirectory) -> int:
    path = run_dir.standing_file(1)
    return decode(path.read_bytes(), Standing).progress.num_finished if path.exists() else 0


async def train(run_dir: RunDirectory, *, saves_late: bool) -> None:
    """A trainer that outlives orchestrators, and saves every second version; the first while it
    trains all others, if it saves late."""
    late = []
    receiver = SpoolReceiver(run_dir, 1, 0)
    for step in range(MAX_STEPS):
        name, version = name_of_batch(step), step + 1
        await wait_until_async(lambda name=name: (run_dir.spool / name).is_dir(), what=name)
        assert receiver.receive(step, timeout_seconds=60).step == step
        await asyncio.sleep(0)
        receiver.send_event(PolicyPublished(version, 1, f"version_{version}", "digest"))
        receiver.send_event(StepFinished(step, 1, {"loss/rl": float(step)}, version % 2 == 0))
        if version % 2 == 0:
            part = CheckpointStore(run_dir, 1).staging(version) / "trainer"
            part.mkdir()
            (part / "weights").write_text("w")
            if saves_late:
                late.append(CheckpointStaged(version, 1))
                await wait_until_async(lambda it=version: stands_at(run_dir) == it, what="standing")
            else:
                receiver.send_event(CheckpointStaged(version, 1))
    for staged in late:
        receiver.send_event(staged)
    receiver.send_event(TrainerDone(MAX_STEPS - 1, 1))


@contextmanager
def death(monkeypatch: pytest.MonkeyPatch, at: int | JournalEvent | None) -> Iterator[None]:
    """The process dies before it writes line `at` of the journal, or the third of one kind:
    nothing of it is written then."""
    written, write = [0], Journal.write

    def write_or_die(self: Journal, event: JournalEvent, **fields: Any) -> None:
        written[0] += 1 if isinstance(at, int) else event is at
        if at is not None and written[0] > (at if isinstance(at, int) else 2):
            raise Killed
        write(self, event, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", write_or_die)
        yield


@dataclass
class Run:
    """A run, whose orchestrator may die; trainer, inference and environments live on."""

    rig: Any
    monkeypatch: pytest.MonkeyPatch

    @property
    def run_dir(self) -> RunDirectory:
        return RunDirectory(self.rig.root)

    async def live(self, *deaths: int | JournalEvent, saves_late: bool = False) -> int:
        """One orchestrator after the other; how many there were before the run ended."""
        mark_run(self.run_dir, "rl")
        write_json(self.run_dir.lease, {"term": 1, "owner": None})
        training = asyncio.create_task(train(self.run_dir, saves_late=saves_late))
        try:
            for number, at in enumerate((*deaths, None), 1):
                if await self._live(at):
                    return number
            raise AssertionError("it died once more")
        finally:
            training.cancel()
            with suppress(asyncio.CancelledError):
                await training

    async def _live(self, at: int | JournalEvent | None) -> bool:
        self.rig.trainer = SpoolSender(self.run_dir, 1, keeps_trained=True, keeps_events=True)
        self.rig.monitor = JsonlMonitor(self.run_dir.metrics, clock=lambda: 0.0)
        threads = ThreadPoolExecutor(4)
        asyncio.get_running_loop().set_default_executor(threads)
        with death(self.monkeypatch, at):
            orchestrator, journal = self.rig.build(find_standing(self.rig.config))
            with journal:
                try:
                    async with asyncio.timeout(60):
                        await orchestrator.play()
                    return True
                except BaseExceptionGroup as group:
                    if group.subgroup(Killed) is None:
                        raise
                    return False
                except Killed:
                    return False
                finally:
                    threads.shutdown(cancel_futures=True)  # They die with their process.
                    self.rig.monitor.close()

    def check(self) -> dict[int, Any]:
        """The batches that the journal has, if it has no contradiction."""
        found = check_journal(self.rig.journal)
        assert found.problems == []
        assert list(found.batches) == list(range(MAX_STEPS))
        assert [it.step for it in read_records(self.run_dir.metrics)] == list(range(MAX_STEPS))
        written = [
            line["gradus"]["episode"]
            for path in sorted(self.run_dir.episodes.glob("step_*/train.jsonl"))
            for line in records(path)
        ]
        assert len(written) == len(set(written))
        assert {sample.split("/")[0] for it in found.batches.values() for sample in it} <= set(
            written
        )
        assert CheckpointStore(self.run_dir, 1).latest() is not None
        lines = surviving(self.rig.journal)
        return {
            line["step"]: (line["samples"], line["digests"])
            for line in lines
            if line["event"] == "batch_shipped"
        }


@pytest.fixture
def new_run(build_rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def build(max_lag: int) -> Run:
        rig = build_rig(
            max_steps=MAX_STEPS,
            max_lag=max_lag,
            group_size=3,
            environment=PlaysBySeed(),
            policy=ScriptedPolicy(),
        )
        saved = {"checkpoint": CheckpointConfig(interval_steps=2)}
        rig.config = rig.config.model_copy(update=saved)
        return Run(rig, monkeypatch)

    return build


@pytest.mark.shows("F05", "I1", "I2", "I5")
@pytest.mark.parametrize("at", range(3, 80, 7))
@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_run_whose_orchestrator_died_anywhere_is_one_run(
    new_run: Any, at: int, max_lag: int
) -> None:
    run, undisturbed = new_run(max_lag), new_run(max_lag)
    await run.live(at)
    batches = run.check()
    if max_lag == 0:
        assert await undisturbed.live() == 1
        assert batches == undisturbed.check()


@pytest.mark.shows("F05", "F80")
async def test_an_orchestrator_may_die_again_and_again(new_run: Any) -> None:
    run = new_run(0)
    assert await run.live(20, 9, 9, 14) == 5
    run.check()


async def test_a_checkpoint_that_is_being_saved_outlives_the_orchestrator(new_run: Any) -> None:
    run = new_run(2)
    assert await run.live(JournalEvent.STEP_FINISHED, saves_late=True) == 2
    run.check()
    assert [step for step, _ in CheckpointStore(run.run_dir, 1).folders()] == [2, 4]


@pytest.mark.shows("F05", "I3")
@pytest.mark.parametrize(("served", "begun"), [(10, [10]), (11, [])])
async def test_a_version_that_is_told_again_is_measured_only_while_it_is_served(
    served: int, begun: list[int]
) -> None:
    """An orchestrator in place of one that measured it and served the next."""

    async def released() -> None:
        return None

    async def serve(published: PolicyPublished, _: object) -> Any:
        return SimpleNamespace(version=published.version)

    def nothing(*_: object) -> None: ...

    found: list[int] = []
    orchestrator: Any = SimpleNamespace(
        trainer=SimpleNamespace(
            refuse_untrained=nothing,
            serve=serve,
            step_metrics=SimpleNamespace(held=nothing),
            policy=SimpleNamespace(version=served),
        ),
        board=WaitBoard(clock=lambda: 0.0),
        evaluation=SimpleNamespace(released=released, begin_if_due=found.append),
        engine=SimpleNamespace(take=nothing),
        end=SimpleNamespace(look=nothing),
        scheduler=SimpleNamespace(note_change=nothing),
        _abandon_too_old=nothing,
    )
    await Orchestrator._serve(orchestrator, PolicyPublished(10, 1, "version_10", "digest"))
    assert found == begun


async def test_where_an_orchestrator_stands_is_of_its_term_and_whole(new_run: Any) -> None:
    run = new_run(0)
    await run.live()
    path = run.run_dir.standing_file(1)
    other = run.rig.config.model_copy(update={"term": 2})
    assert find_standing(other) is None
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ProtocolError, match=r"term_00000001\.msgpack cannot be read"):
        find_standing(run.rig.config)
    assert find_standing(run.rig.config) is None


async def test_an_episode_is_encoded_once_however_often_its_group_is_written(
    new_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: Counter[str] = Counter()

    def save(played: PlayedEpisode) -> PlayedState:
        encoded[played.id] += 1
        return save_played(played)

    monkeypatch.setattr(snapshot, "save_played", save)
    assert await new_run(2).live() == 1
    assert set(encoded.values()) == {1}

"""What a checkpoint keeps of the orchestrator, and how it refuses what is not whole."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from builders import build_sample
from checkpoints import FaultyFiles, new_run, reread
from forgetful_disk import ForgetfulDisk
from scripted_peers import ScriptedPolicy

from gradus.config import CheckpointConfig
from gradus.errors import ConfigError, CorruptStateError, FullDiskError, ProtocolError
from gradus.orchestrator.evaluation.evaluator import Measured
from gradus.orchestrator.groups.batcher import Filling, ReadyGroup, SampleBatch
from gradus.orchestrator.groups.slots import EndedEpisodes, GroupSlots
from gradus.orchestrator.groups.solved import EarnedRange, EarnedRanges
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.play.concurrency import Load
from gradus.orchestrator.play.inference_client import AppliedPolicy
from gradus.orchestrator.play.player import episode_seed
from gradus.orchestrator.play.tasks import SourceShare, TaskQueue, TaskSource
from gradus.orchestrator.records.journal import Journal, JournalEvent, read_journal
from gradus.orchestrator.records.metrics import (
    PendingStepMetrics,
    SinceLastBatch,
    UnfinishedRecords,
)
from gradus.orchestrator.records.recording import load_played, save_played
from gradus.orchestrator.records.starvation import GroupTime, LastGroups, PlayTime
from gradus.orchestrator.resume import checkpoint
from gradus.orchestrator.resume.checkpoint import (
    FORMAT,
    CheckpointWriter,
    OrchestratorState,
    SavedOrchestrator,
    SavedPieces,
    Snapshot,
    load_orchestrator,
    load_pieces,
    load_plugins,
    take_pieces,
    take_plugins,
)
from gradus.orchestrator.types import (
    EpisodeOutcome,
    Failure,
    GroupOutcome,
    GroupPhase,
    PlayedEpisode,
)
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.codec import decode, encode
from gradus.wire.events import PolicyPublished
from gradus.wire.versions import VersionSpan


class Noted(msgspec.Struct):
    value: int = 0


class Notebook:
    """A piece of our own."""

    def __init__(self) -> None:
        self.state = Noted()


class Judge:
    """A plug-in that remembers what it was given."""

    def __init__(self) -> None:
        self.value: Any = None

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def state_of(step: int) -> OrchestratorState:
    return OrchestratorState(
        format=FORMAT,
        step=step,
        max_steps=9,
        journal_lines=0,
        num_drawn=0,
        open_groups=[],
        cut_off=[],
        plugins={},
    )


async def snapshot_of(step: int) -> Snapshot:
    sizes: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
    sizes.set_result({"metrics.jsonl": 7})
    return Snapshot(
        step, msgspec.json.encode(state_of(step)), encode(SavedPieces({}, [], [])), sizes
    )


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    """A writer in a run of nine steps with a checkpoint every two."""
    run_dir = new_run(tmp_path)
    with Journal(run_dir.journal, term=0, now=lambda: 0.0) as journal:
        config = CheckpointConfig(interval_steps=2)
        yield CheckpointWriter(CheckpointStore(run_dir, 0), config, journal=journal)


def stage_trainer(writer: CheckpointWriter, step: int) -> None:
    part = writer.checkpoints.staging(step) / "trainer"
    part.mkdir()
    (part / "weights").write_text("w")


def test_every_piece_gets_its_state() -> None:
    before, after = {"a": Notebook(), "b": Notebook()}, {"a": Notebook(), "b": Notebook()}
    before["a"].state.value, before["b"].state.value = 1, 2
    load_pieces(after, take_pieces(before))
    assert [piece.state.value for piece in after.values()] == [1, 2]


def test_every_plugin_gets_its_state() -> None:
    plugins = {"a": Judge(), "b": Judge()}
    load_plugins(plugins, {"a": {"value": 1}, "b": {"value": 2}})
    assert [plugin.value for plugin in plugins.values()] == [1, 2]


def test_a_missing_piece_is_named_and_nothing_starts_cold() -> None:
    with pytest.raises(CorruptStateError, match="has no state of counters"):
        load_pieces({"counters": Notebook()}, {})
    with pytest.raises(CorruptStateError, match="has no state of algorithm words"):
        load_plugins({"algorithm words": Judge()}, {})


def test_a_piece_that_the_run_does_not_have_is_named() -> None:
    with pytest.raises(CorruptStateError, match="has state of counters"):
        load_pieces({}, {"counters": b""})
    with pytest.raises(CorruptStateError, match="has state of algorithm sums"):
        load_plugins({}, {"algorithm sums": {}})


def test_a_damaged_piece_is_named() -> None:
    with pytest.raises(CorruptStateError, match="state of counters in the checkpoint"):
        load_pieces({"counters": Notebook()}, {"counters": b"\x81\xa5value\xa1x"})


def test_a_damaged_state_of_a_plugin_is_named() -> None:
    with pytest.raises(
        CorruptStateError, match=r"state of algorithm words .*: KeyError: 'value'.* damaged"
    ):
        load_plugins({"algorithm words": Judge()}, {"algorithm words": {}})


def test_a_plugin_that_does_not_take_its_state_is_named_with_its_class() -> None:
    class Changed(Judge):
        def load_state(self, state: dict[str, Any]) -> None:
            raise AttributeError(state["value"])

    with pytest.raises(CorruptStateError, match=r"algorithm words .*Changed .*AttributeError: old"):
        load_plugins({"algorithm words": Changed()}, {"algorithm words": {"value": "old"}})


def test_a_plugin_that_cannot_say_its_state_is_named_with_its_class() -> None:
    class Broken(Judge):
        def state(self) -> dict[str, Any]:
            raise LookupError("no rates")

    with pytest.raises(ConfigError, match=r"algorithm words .*Broken: LookupError: no rates"):
        take_plugins({"algorithm words": Broken()})


def test_a_state_is_copied_when_it_is_taken() -> None:
    judge, notebook = Judge(), Notebook()
    judge.value = {"rates": [0.5]}
    taken, kept = take_plugins({"algorithm words": judge}), take_pieces({"notes": notebook})
    judge.value["rates"].append(0.75)
    notebook.state.value = 7
    assert taken == {"algorithm words": {"value": {"rates": [0.5]}}}
    load_pieces({"notes": notebook}, kept)
    assert notebook.state.value == 0


def test_a_state_that_json_cannot_keep_names_its_plugin() -> None:
    judge = Judge()
    judge.value = {"rates": [0.5, float("nan")]}
    with pytest.raises(ConfigError, match=r"algorithm words .*:Judge holds nan at 'value.rates\[1"):
        take_plugins({"algorithm words": judge})


@pytest.mark.shows("F18")
async def test_both_parts_are_committed_together(tmp_path: Path, writer: CheckpointWriter) -> None:
    run_dir = RunDirectory(tmp_path / "demo")
    stage_trainer(writer, 2)
    writer.take(2, await snapshot_of(2))
    await writer.commit(2)
    checkpoint = CheckpointStore(run_dir, 1).latest()
    assert checkpoint is not None
    assert checkpoint.label.parts == ["trainer", "orchestrator"]
    assert load_orchestrator(checkpoint).state == state_of(2)
    assert read_journal(run_dir.journal)[-1]["event"] == "checkpoint_committed"


async def test_a_committed_checkpoint_has_its_journal_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    disk = ForgetfulDisk.under(run_dir.root, monkeypatch)
    with Journal(run_dir.journal, term=0, now=lambda: 0.0) as journal:
        config = CheckpointConfig(interval_steps=2)
        writer = CheckpointWriter(CheckpointStore(run_dir, 0), config, journal=journal)
        journal.write(JournalEvent.STEP_FINISHED, step=1)
        stage_trainer(writer, 2)
        writer.take(2, await snapshot_of(2))
        await writer.commit(2)
    disk.lose_power()
    checkpoint = CheckpointStore(run_dir, 1).latest()
    assert checkpoint is not None
    assert load_orchestrator(checkpoint).state == state_of(2)
    assert [line["event"] for line in read_journal(run_dir.journal)] == ["step_finished"]


@pytest.mark.shows("F18")
async def test_a_checkpoint_that_no_snapshot_waits_for_is_discarded(
    writer: CheckpointWriter,
) -> None:
    stage_trainer(writer, 2)
    await writer.commit(2)
    assert list(writer.checkpoints.run_dir.checkpoints.iterdir()) == []


async def test_a_checkpoint_whose_trainer_part_is_gone_is_not_kept(
    writer: CheckpointWriter,
) -> None:
    stage_trainer(writer, 2)
    writer.take(2, await snapshot_of(2))
    CheckpointStore(writer.checkpoints.run_dir, 0).discard_staged()
    await writer.commit(2)
    assert list(writer.checkpoints.run_dir.checkpoints.iterdir()) == []


@pytest.mark.shows("F01")
async def test_batches_are_needed_from_the_checkpoint_before_the_newest_on(
    writer: CheckpointWriter,
) -> None:
    forgotten = []

    async def forget(step: int) -> None:
        forgotten.append(step)

    writer.forget = forget
    for step in (2, 4, 6):
        stage_trainer(writer, step)
        writer.take(step, await snapshot_of(step))
        await writer.commit(step)
    assert forgotten == [2, 4]


@pytest.mark.shows("F23")
async def test_a_full_disk_costs_checkpoints_and_no_step_and_only_the_last_one_waits_for_it(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LAST_SAVE_PAUSE_SECONDS", 0.0)
    for step in (2, 4, 6, 8, 10):
        writer.files = FaultyFiles(at=1, full=True)
        stage_trainer(writer, step)
        writer.take(step, await snapshot_of(step))
        if step < 10:
            await writer.commit(step)
            assert writer.checkpoints.latest() is None
    monkeypatch.setattr(checkpoint, "LAST_SAVE_SECONDS", 0.0)
    with pytest.raises(FullDiskError, match="No space left"):
        await writer.commit(10, is_last=True)
    monkeypatch.setattr(checkpoint, "LAST_SAVE_SECONDS", 60.0)
    writer.files = FaultyFiles(at=1, full=True)
    writer.take(10, await snapshot_of(10))
    await writer.commit(10, is_last=True)
    assert [step for step, _ in writer.checkpoints.folders()] == [10]


async def test_a_slow_disk_under_the_journal_does_not_stop_the_loops(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def sync_slowly(_: int) -> None:
        begun.set()
        assert may_end.wait(60), "the event loop stood still while the journal was synced"

    monkeypatch.setattr(os, "fsync", sync_slowly)
    stage_trainer(writer, 2)
    writer.take(2, await snapshot_of(2))
    committing = asyncio.create_task(writer.commit(2))
    await asyncio.to_thread(begun.wait, 10)
    assert not committing.done()
    may_end.set()
    await committing


@pytest.mark.shows("F27")
async def test_a_journal_that_cannot_be_synced_costs_the_checkpoint(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    stage_trainer(writer, 2)
    writer.take(2, await snapshot_of(2))
    await writer.commit(2)
    assert writer.checkpoints.latest() is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: s.pop("num_drawn"), "missing required field `num_drawn`"),
        (lambda s: s.update(extra=1), "unknown field `extra`"),
        (lambda s: s.update(step=3), "holds step 3"),
        (lambda s: s.update(format=99), "in format 99"),
    ],
)
async def test_a_state_file_with_a_piece_more_or_less_is_refused_by_name(
    writer: CheckpointWriter, change: Any, complaint: str
) -> None:
    stage_trainer(writer, 2)
    writer.take(2, await snapshot_of(2))
    await writer.commit(2)
    checkpoint = writer.checkpoints.load(2)
    path = checkpoint.part("orchestrator") / "state.json"
    content = msgspec.json.decode(path.read_bytes())
    change(content)
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(CorruptStateError, match=complaint):
        load_orchestrator(checkpoint)


def test_a_played_episode_comes_back_with_tokens_logprobs_and_credit() -> None:
    episode = build_episode([build_trace(turns=2, seed=4, reward=0.25)])
    episode.traces[0].nodes[1].advantages = [0.1, 0.2, 0.3, 0.4]
    episode.traces[0].nodes[1].reference_logprobs = [-1.0] * 4
    played = PlayedEpisode("g1.0", "g1", VersionSpan(1, 2), episode, None, 1.5)
    saved = msgspec.msgpack.decode(
        msgspec.msgpack.encode(save_played(played)), type=type(save_played(played))
    )
    assert load_played(saved) == played


def test_experts_are_kept_small_and_those_that_an_older_gradus_kept_plain_are_read() -> None:
    episode = build_episode([build_trace(turns=2, seed=4)])
    experts = np.random.default_rng(0).integers(0, 8, (500, 48, 8)).astype(np.uint8)
    episode.traces[0].nodes[1].routed_experts = experts
    played = PlayedEpisode("g1.0", "g1", VersionSpan(1, 2), episode)
    saved = save_played(played)
    assert saved.episode is not None
    assert len(saved.episode) < 0.5 * experts.nbytes
    old = msgspec.structs.replace(
        saved, episode=msgspec.msgpack.encode(episode.model_dump(mode="python"))
    )
    for state in (saved, old):
        loaded = load_played(state).episode
        assert loaded is not None
        found = [node.routed_experts for node in loaded.traces[0].nodes]
        assert found[1] is not None
        assert found[1].dtype == np.uint8
        assert (found[1] == experts).all()
        assert sum(it is None for it in found) == len(found) - 1
    damaged = msgspec.structs.replace(saved, episode=saved.episode.replace(b"\x78\x01", b"\0\0"))
    with pytest.raises(CorruptStateError, match=r"episode g1\.0 cannot be read back"):
        load_played(damaged)


def test_episodes_that_failed_or_were_cancelled_come_back_too() -> None:
    for failure in (Failure("ProviderError", "refused"), None):
        played = PlayedEpisode("g1.0", "g1", VersionSpan(0, 0), failure=failure)
        assert load_played(save_played(played)) == played


def test_numbers_of_numpy_that_an_algorithm_left_come_back_as_numbers() -> None:
    episode = build_episode()
    episode.traces[0].info["judge"] = {"score": np.float64(0.5), "votes": np.arange(2)}
    loaded = load_played(save_played(PlayedEpisode("g1.0", "g1", VersionSpan(0, 0), episode)))
    assert loaded.episode is not None
    assert loaded.episode.traces[0].info["judge"] == {"score": 0.5, "votes": [0, 1]}


def test_an_episode_that_cannot_be_written_is_named() -> None:
    episode = build_episode()
    episode.traces[0].info["judge"] = object()
    with pytest.raises(ConfigError, match=r"episode g1\.0 cannot be recorded: it holds a object"):
        save_played(PlayedEpisode("g1.0", "g1", VersionSpan(0, 0), episode))


def test_an_episode_that_is_no_episode_is_corruption() -> None:
    saved = msgspec.structs.replace(
        save_played(PlayedEpisode("g1.0", "g1", VersionSpan(0, 0))), episode=b"\x80"
    )
    with pytest.raises(CorruptStateError, match=r"episode g1\.0 cannot be read back"):
        load_played(saved)


def test_interrupted_groups_are_drawn_first_under_their_old_numbers() -> None:
    queue = TaskQueue(TaskSource([SourceShare("words", 1.0, num_tasks=None)], seed=0))
    first, second, third = queue.next(), queue.next(), queue.next()
    queue.opened(second)
    assert queue.waiting == [first, third]
    resumed = TaskQueue(TaskSource([SourceShare("words", 1.0, num_tasks=None)], seed=0))
    resumed.restore([third, first], num_drawn=3)
    assert resumed.waiting == [first, third]
    assert [resumed.next().number for _ in range(3)] == [0, 2, 3]


def test_seeds_differ_by_episode_and_run_and_fit_any_engine() -> None:
    names = [f"g{group:06d}.{number}" for group in range(40) for number in range(8)]
    seeds = {episode_seed(run, name) for run in range(3) for name in names}
    assert len(seeds) == 3 * 40 * 8
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def test_a_retry_samples_from_another_seed() -> None:
    seeds = [episode_seed(0, "g000001.0", retry) for retry in range(3)]
    assert len(set(seeds)) == 3
    assert seeds[0] == episode_seed(0, "g000001.0")


def test_a_restored_ledger_counts_neither_open_nor_lost_episodes_twice() -> None:
    slots = GroupSlots(budget=3)
    for group in ("done", "open", "given up"):
        for episode in slots.open(group, size=2):
            slots.start(episode, version=0)
    slots.end("done.0", EpisodeOutcome.FINISHED)
    slots.end("done.1", EpisodeOutcome.FAILED)
    slots.complete("done")
    slots.end("open.0", EpisodeOutcome.FINISHED)
    slots.abandon("given up")
    assert slots.state.of_outcomes == {"finished": 1, "failed": 1, "cancelled": 2}
    assert slots.abandoned() == ["given up"]
    resumed = GroupSlots(budget=3)
    resumed.state = reread(slots.state)
    resumed.restore("done")
    assert (resumed.started, resumed.ended.total(), resumed.free_slots) == (4, 4, 2)
    assert resumed.phase("done") is GroupPhase.COMPLETE


def test_a_restored_batch_frees_its_slots_when_its_version_is_served() -> None:
    slots = GroupSlots(budget=2, total_groups=4)
    slots.restore("a", step=3)
    assert slots.free_slots == 1
    assert slots.release_trained(version=4) == 1
    assert slots.free_slots == 2


async def applied(version: int) -> AppliedPolicy:
    return AppliedPolicy(version, 0.1, 0.05, await ScriptedPolicy().status())


async def test_a_record_that_waited_for_its_version_is_completed_after_the_resume() -> None:
    before = PendingStepMetrics(now=0.0)
    before.shipped(4, {"batch/samples/sum": 3.0})
    before.finished(4, {"loss/total/mean": 0.5})
    resumed = PendingStepMetrics(now=0.0)
    resumed.state = reread(before.state)
    metrics = resumed.applied_again(await applied(5), now=1.0)
    assert metrics is not None
    assert (metrics["loss/total/mean"], metrics["batch/samples/sum"]) == (0.5, 3.0)


async def test_a_record_that_was_complete_is_not_written_again() -> None:
    resumed = PendingStepMetrics(now=0.0)
    assert resumed.applied_again(await applied(5), now=1.0) is None
    assert (resumed.state.open, resumed.state.applied) == ({}, set())


async def test_a_resumed_trainer_must_publish_its_checkpoint_first(build_rig: Any) -> None:
    rig = build_rig()
    first, journal = rig.build()
    with journal:
        snapshot = first.snapshotter.snapshot(1)
    resumed, journal = rig.build(saved_from(snapshot))
    rig.trainer.say(PolicyPublished(2, 1, "version_2", "digest"))
    with journal, pytest.raises(ProtocolError, match="must publish version 1 first"):
        await resumed.trainer.serve_first()


def saved_from(snapshot: Snapshot) -> SavedOrchestrator:
    """What a resume reads of a snapshot."""
    state = msgspec.json.decode(snapshot.state, type=OrchestratorState)
    return SavedOrchestrator(state, decode(snapshot.pieces, SavedPieces))


def batch_of(step: int) -> SampleBatch:
    sample = build_sample(id=f"g{step:06d}.0/0/0")
    return SampleBatch(step, (ReadyGroup(f"g{step:06d}", (sample,)),))


async def test_batches_that_are_not_trained_are_sent_again_and_hold_their_slots(
    build_rig: Any,
) -> None:
    rig = build_rig(max_lag=3)
    first, journal = rig.build()
    with journal:
        for step in range(3):
            first.snapshotter.cut(batch_of(step))
        first.snapshotter.trained(0, is_saved=False)
        snapshot = first.snapshotter.snapshot(1)
    resumed, journal = rig.build(saved_from(snapshot))
    with journal:
        slots = resumed.groups.slots
        assert [batch.step for batch in resumed.trainer.to_send_again] == [1, 2]
        assert slots.free_slots == 4 - 2  # The two steps that are left train four groups.
        assert slots.release_trained(version=2) == 1


async def test_every_piece_continues_where_it_stood(build_rig: Any) -> None:
    def pieces_of(orchestrator: Orchestrator) -> dict[str, Any]:
        groups = orchestrator.groups
        return {
            "slots": groups.slots,
            "batcher": groups.batcher,
            "counters": groups.counters,
            "starvation": groups.starvation,
            "rewards": groups.rewards,
            "steps": orchestrator.trainer.step_metrics,
            "evaluation": orchestrator.evaluation,
        }

    time = GroupTime(GroupOutcome.TOO_SLOW, (PlayTime(2.5, None, is_trained=False),))
    states = {
        "slots": EndedEpisodes(dict.fromkeys(EpisodeOutcome, 3)),
        "batcher": Filling(2, empty_groups=1, reasons=Counter(stale=1)),
        "counters": SinceLastBatch(judged=3, counts=Counter({"episode/retried/sum": 1})),
        "starvation": LastGroups({"words": [time]}),
        "rewards": EarnedRanges({"words": EarnedRange(-0.5, 0.75)}),
        "steps": UnfinishedRecords({4: {"batch/samples/sum": 3.0}}, finished={4}),
        "evaluation": Measured(2, set()),
    }
    rig = build_rig()
    first, journal = rig.build()
    with journal:
        for name, piece in pieces_of(first).items():
            piece.state = states[name]
        snapshot = first.snapshotter.snapshot(2)
    resumed, journal = rig.build(saved_from(snapshot))
    with journal:
        assert {name: piece.state for name, piece in pieces_of(resumed).items()} == states


async def test_a_draw_whose_group_was_not_open_is_drawn_again(build_rig: Any) -> None:
    rig = build_rig()
    first, journal = rig.build()
    with journal:
        queue = first.snapshotter.queue
        waiting, opened = queue.next(), queue.next()
        queue.opened(opened)
        snapshot = first.snapshotter.snapshot(1)
    resumed, journal = rig.build(saved_from(snapshot))
    with journal:
        assert resumed.snapshotter.queue.waiting == [waiting]
        assert resumed.snapshotter.queue.next() == waiting


async def test_the_journal_says_which_abandoned_groups_a_resume_cut_off(build_rig: Any) -> None:
    """Their episodes end in no line of it."""
    rig = build_rig()
    first, journal = rig.build()
    with journal:
        slots = first.groups.slots
        for group_id in ("g000000", "g000001"):
            slots.start(slots.open(group_id, size=2)[0], version=0)
        slots.abandon("g000001")
        snapshot = first.snapshotter.snapshot(1)
    _, journal = rig.build(saved_from(snapshot))
    with journal:
        (line,) = rig.events("run_resumed")
        assert line["cut_off"] == ["g000001"]


async def test_the_in_flight_limit_goes_on_where_it_stood(build_rig: Any) -> None:
    """A resumed run does not flood the engine that had just been found to be full."""
    rig = build_rig(max_in_flight_episodes=100)
    first, journal = rig.build()
    with journal:
        assert first.scheduler.max_in_flight == 100
        full = Load(40, num_ended=0, running=40, waiting=0, kv_usage=0.875, preemptions=0)
        assert first.engine._controller.observe(full) == 32
        snapshot = first.snapshotter.snapshot(1)
    resumed, journal = rig.build(saved_from(snapshot))
    with journal:
        assert resumed.scheduler.max_in_flight == 32


async def test_unfinished_numbers_that_are_not_finite_survive_a_restart() -> None:
    records = PendingStepMetrics(now=0.0)
    records.shipped(0, {"loss/ratio/max": float("inf"), "batch/samples/sum": 2.0})
    resumed = PendingStepMetrics(now=0.0)
    resumed.state = reread(records.state)
    assert resumed.state.open == {0: {"loss/ratio/max": float("inf"), "batch/samples/sum": 2.0}}


async def test_a_complete_record_leaves_nothing_behind() -> None:
    records = PendingStepMetrics(now=0.0)
    for step in range(3):
        records.shipped(step, {"batch/samples/sum": 1.0})
        records.finished(step, {})
        assert records.applied(await applied(step + 1), now=float(step)) is not None
    assert (records.state.open, records.state.finished, records.state.applied) == ({}, set(), set())

"""The orchestrator plays tasks, scores groups, ships batches and keeps the served policy fresh.

Six loops in one task group; none polls, none looks at a flag:

    loop      consumes            waits for                    produces             unblocked by
    schedule  tasks               a free slot, room in flight  running episodes     collect, refresh
    collect   ended episodes      its group to be complete     samples for a batch  environments
    ship      full batches        room on the disk             micro batches        collect, trainer
    refresh   trainer's events    inference, a new version     free slots           trainer
    record    what is final       the next one                 lines on disk        all others
    evaluate  versions to judge   its episodes                 metrics              refresh

The run ends when the trainer says that it applied its last step. Next page: `play/player.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradus.errors import ProtocolError
from gradus.heartbeat import BEAT_SECONDS
from gradus.orchestrator.buffer import GroupBuffer
from gradus.orchestrator.early_end import EarlyEnd
from gradus.orchestrator.evaluation.evaluator import RlEvaluation
from gradus.orchestrator.failures import to_its_end
from gradus.orchestrator.play.concurrency import EngineWatch, Scheduler
from gradus.orchestrator.play.player import EpisodePlayer
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.watchdog import WaitBoard, WaitFor, describe_chain
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.resume.snapshot import Snapshotter
from gradus.orchestrator.resume.standing import StandingWriter
from gradus.orchestrator.trainer_link import TrainerLink
from gradus.orchestrator.types import Group
from gradus.wire.events import CheckpointStaged, PolicyPublished, StepFinished, TrainerDone


@dataclass(frozen=True)
class Orchestrator:
    """Owns the loops; `build.py` makes what they work on."""

    groups: GroupBuffer
    scheduler: Scheduler
    player: EpisodePlayer
    trainer: TrainerLink
    evaluation: RlEvaluation
    engine: EngineWatch
    snapshotter: Snapshotter
    standing: StandingWriter
    end: EarlyEnd
    records: RecordWriter
    journal: Journal
    board: WaitBoard
    watches: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    """What runs beside the loops until they end."""
    clock: Callable[[], float]
    """Monotonic seconds, for metrics and the rate of starts."""

    async def play(self) -> None:
        """Run all loops until the trainer is done; the first error ends them all."""
        policy = self.trainer.policy
        async with asyncio.TaskGroup() as tasks:
            if not self.trainer.is_serving:
                await self.trainer.serve_first()
            watches = [tasks.create_task(self.end.after("a watch", it)) for it in self.watches]
            self.evaluation.begin_if_due(policy.version)
            self.end.look()
            scheduling = tasks.create_task(
                self.end.after("schedule", partial(self.schedule, tasks))
            )
            collecting = tasks.create_task(self.end.after("collect", self.collect))
            shipping = tasks.create_task(to_its_end("ship", self.ship))
            recording = tasks.create_task(to_its_end("record", self.records.run))
            tasks.create_task(self.standing.take())
            last_step = await self.refresh(tasks)
            if not self.trainer.has_all_batches:
                raise ProtocolError(
                    f"the trainer left after step {last_step}, the run has {self.trainer.max_steps}"
                )
            await shipping
            scheduling.cancel()
            # Nothing more ends and nothing more is recorded, so both loops drain and return.
            await self.player.close()
            await collecting
            await self.end.evaluated(policy.version)
            self.groups.drop_leftovers()
            self.records.close()
            await recording
            for watch in watches:
                watch.cancel()
        await self.trainer.sender.forget(last_step)
        self.end.raise_failure()
        self.journal.write(JournalEvent.RUN_ENDED, step=last_step)

    def silent(self) -> dict[str, str]:
        """What keeps the run waiting, for the launcher to say."""
        found = {}
        if self.board.quiet_seconds >= BEAT_SECONDS:
            found["the run"] = f"waits: {describe_chain(self.board.waits())}"
        if self.engine.is_silent:
            found["inference"] = "has not answered"
        return found

    async def schedule(self, tasks: asyncio.TaskGroup) -> None:
        """Start episodes, oldest group first; open a group when all planned ones started.

        Returns when an early end is noted: what runs then is settled, and nothing more begins.
        """
        while self.end.batcher.ended is None:
            while (planned := self.scheduler.next_episode(now=self.clock())) is not None:
                group = self.groups.groups[planned.group_id]
                version = self.player.start(planned.id, group, tasks)
                self.groups.start(planned.id, version=version)
                self.board.moved()
            held_back = self.scheduler.wait_seconds(now=self.clock())
            if not held_back and self.scheduler.wants_group and self.groups.slots.free_slots > 0:
                await self._open_group()
                continue
            with self.board.waiting("schedule", self._schedule_wait, is_progress=False):
                await self.scheduler.changed(at_most_seconds=held_back)

    async def _open_group(self) -> None:
        draw = self.groups.queue.next()
        asked = WaitFor(f"task {draw.task.index}", on=f"environment {draw.task.source!r}")
        with self.board.waiting("schedule", asked):
            opened = await self.groups.open(draw)
        if opened is not None:
            group, episode_ids = opened
            self.scheduler.plan(group.id, episode_ids)
        # Thousands of slots may become free at once; the other loops get their turn in between.
        await asyncio.sleep(0)

    def _schedule_wait(self) -> WaitFor:
        if self.groups.slots.free_slots == 0 and self.scheduler.wants_group:
            return WaitFor("a free slot", on="refresh")
        if self.scheduler.in_flight >= self.scheduler.max_in_flight:
            return WaitFor("room in flight", on="collect")
        return WaitFor("the rate of starts", on="time")

    async def collect(self) -> None:
        """Settle ended episodes; grade each group when its last one ended, or begin to score it."""
        async with asyncio.TaskGroup() as scoring:
            judged: set[asyncio.Task[None]] = set()
            while True:
                with self.board.waiting("collect", self._collect_wait):
                    played = await self.player.ended.get()
                if played is None:
                    break
                self.scheduler.ended()
                complete = None
                with self.end.saved_before():  # What still runs then is settled too.
                    complete = self.groups.settle(played)
                if complete is not None:
                    score = partial(self._score, complete)
                    task = scoring.create_task(to_its_end("scoring", score))
                    judged.add(task)
                    task.add_done_callback(judged.discard)
                # Grading a group takes milliseconds, and the queue may be long.
                await asyncio.sleep(0)
            for task in judged:  # The run has ended: their groups train nothing.
                task.cancel()

    async def _score(self, group: Group) -> None:
        """Beside all loops: a judge may take minutes."""
        with self.end.saved_before():
            await self.groups.score(group)
        self.standing.keep(group.id)
        self.board.moved()
        self.scheduler.note_change()

    def _collect_wait(self) -> WaitFor:
        running = self.player.running
        if not running and self.groups.slots.is_scoring:
            return WaitFor("a group to be scored", on="its algorithm")
        if not running:
            return WaitFor("an episode to start", on="schedule")
        return WaitFor("an episode to end", on=f"environment {running[0].group.source!r}")

    async def ship(self) -> None:
        """Send each full batch to the trainer, in step order; ends after the last step."""
        for sent in self.trainer.to_send_again:
            await self.trainer.send(sent)
        while not self.trainer.has_all_batches:
            begun = self.clock()
            with self.board.waiting("ship", WaitFor("a full batch", on="collect")):
                await self.end.decided()
                batch = None
                if await self.groups.batcher.is_full():
                    # What the trainer may see must be cut again by whoever takes this one's place.
                    await self.standing.take()
                    batch = await self.groups.batcher.next_batch()
            if batch is None:
                await self.end.announce()
                continue
            self.snapshotter.cut(batch)
            # Before slots were free the trainer was waited for, not the episodes.
            waited = self.clock() - max(begun, self.trainer.served_at)
            metrics = self.groups.ship(batch) | {"time/generate_wait_seconds": waited}
            self.trainer.step_metrics.shipped(batch.step, metrics)
            self._abandon_too_old()
            await self.trainer.send(batch)

    def _abandon_too_old(self) -> None:
        abandoned = self.groups.abandon_too_old()
        for group_id in abandoned.group_ids:
            self.scheduler.forget(group_id)
        self.player.cancel(abandoned.running)
        self.scheduler.note_change()

    async def refresh(self, tasks: asyncio.TaskGroup) -> int:
        """Follow the trainer: serve what it publishes, free slots; returns its last step."""
        while True:
            event = await self.trainer.next_event()
            match event:
                case StepFinished(step=step, is_saved=is_saved):
                    self.end.look()
                    # Without an await since the event came: the snapshot is of this moment.
                    self.end.trained(step, is_saved=is_saved)
                    tasks.create_task(self.standing.take())
                case CheckpointStaged(step=step):
                    is_last = self.end.is_last(step)
                    commit = partial(self.snapshotter.commit, step, is_last=is_last)
                    tasks.create_task(to_its_end("commit", commit))
                case PolicyPublished():
                    await self._serve(event)
                case TrainerDone(step=step):
                    return step

    async def _serve(self, published: PolicyPublished) -> None:
        self.trainer.refuse_untrained(published)
        held = WaitFor("the evaluation of the version served now", on="evaluation")
        with self.board.waiting("refresh", held):
            seconds = await self.evaluation.released()
        self.trainer.step_metrics.held(published.version - 1, seconds)
        self._abandon_too_old()
        applied = await self.trainer.serve(published, self.engine.take)
        self.end.look()
        # One that is told again to an orchestrator in place of another may be overtaken.
        if applied.version == self.trainer.policy.version:
            self.evaluation.begin_if_due(applied.version)
        self.scheduler.note_change()

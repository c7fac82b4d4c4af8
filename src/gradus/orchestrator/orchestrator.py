"""The orchestrator plays tasks, scores groups, ships batches and keeps the served policy fresh.

Five loops in one task group; none polls, none looks at a flag:

    loop      consumes            waits for                    produces             unblocked by
    schedule  tasks               a free slot, room in flight  running episodes     collect, refresh
    collect   ended episodes      its group to be complete     samples for a batch  environments
    ship      full batches        room in the transport        micro batches        collect, trainer
    refresh   the trainer's news  inference, a new version     free slots           trainer
    record    what is final       the next one                 lines on disk        all others

The run ends when the trainer says that it applied its last step.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradus.config.process import OrchestratorProcessConfig
from gradus.errors import DeadlineError, GradusError, ProtocolError
from gradus.orchestrator.batcher import Batcher, ReadyGroup, SampleBatch, StaleDrop
from gradus.orchestrator.episode_check import EpisodeFailed, find_failure
from gradus.orchestrator.grading import Group, PlayedEpisode, give_up, grade
from gradus.orchestrator.group_ledger import GroupLedger, Phase
from gradus.orchestrator.journal import JournalEvent
from gradus.orchestrator.metrics import Metrics, StepRecords, Tally, batch_metrics
from gradus.orchestrator.packing import Layout, build_batch
from gradus.orchestrator.parts import Parts, open_parts
from gradus.orchestrator.scheduler import PlannedEpisode, Scheduler
from gradus.orchestrator.task_source import TaskSource
from gradus.run_dir import RunDirectory, write_json
from gradus.wire.events import BatchReceived, Event, PolicyPublished, StepFinished, TrainerDone
from gradus.wire.policy import VersionSpan

ABANDONED = "abandoned"
RUN_ENDED = "run_ended"
STALE = "stale"


def run(config: OrchestratorProcessConfig) -> None:
    """The orchestrator process, from its ready file to the trainer's last step."""
    try:
        asyncio.run(_run(config))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


async def _run(config: OrchestratorProcessConfig) -> None:
    async with open_parts(config) as parts:
        run_dir = RunDirectory(Path(config.run_dir))
        ready = {"pid": os.getpid(), "epoch": config.epoch}
        write_json(run_dir.ready_file("orchestrator"), ready)
        await Orchestrator(config, parts).play()


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first that names itself, else the first of all."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, GradusError)), leaves[0])


@dataclass(frozen=True)
class _EpisodesToRecord:
    """The played episodes of a group are final."""

    group: Group
    step: int


@dataclass(frozen=True)
class _MetricsToRecord:
    """The numbers of a step are complete."""

    metrics: Metrics
    step: int


class Orchestrator:
    """Owns the loops and what they share; every part is handed in complete.

    >>> await Orchestrator(config, parts).play()  # doctest: +SKIP
    """

    def __init__(self, config: OrchestratorProcessConfig, parts: Parts) -> None:
        settings = config.orchestrator
        self._config = config
        self._parts = parts
        self._tasks = TaskSource([s.share for s in parts.sources.values()], seed=config.seed)
        self._ledger = GroupLedger(
            slots=(settings.max_lag + 1) * settings.groups_per_batch,
            total_groups=config.max_steps * settings.groups_per_batch,
        )
        self._scheduler = Scheduler(max_in_flight=settings.max_in_flight_episodes)
        self._batcher = Batcher(
            groups_per_batch=settings.groups_per_batch,
            max_staleness=settings.max_staleness,
            max_empty_attempts=settings.max_empty_attempts,
        )
        self._layout = Layout(config.data_parallel_size, config.micro_batch_tokens)
        self._groups: dict[str, Group] = {}
        self._num_opened = 0
        self._num_shipped = 0
        self._num_finished = 0
        self._num_served = 0
        self._running: dict[str, asyncio.Task[PlayedEpisode]] = {}
        self._ended: asyncio.Queue[PlayedEpisode | None] = asyncio.Queue()
        self._to_record: asyncio.Queue[_EpisodesToRecord | _MetricsToRecord | None]
        self._to_record = asyncio.Queue()
        self._room = asyncio.Event()
        self._trainer_owes = asyncio.Event()
        self._tally = Tally()
        self._slots_freed_at = parts.clock()
        self._steps = StepRecords(now=self._slots_freed_at)

    async def play(self) -> None:
        """Run all loops until the trainer is done; the first error ends them all."""
        self._parts.journal.write(JournalEvent.RUN_STARTED, version=self._parts.policy.version)
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(source.environment.watch())
                for source in self._parts.sources.values()
            ]
            scheduling = tasks.create_task(self.schedule(tasks))
            collecting = tasks.create_task(self.collect())
            shipping = tasks.create_task(self.ship())
            recording = tasks.create_task(self.record())
            last_step = await self.refresh()
            if self._num_shipped < self._config.max_steps:
                raise ProtocolError(
                    f"the trainer left after step {last_step}, the run has {self._config.max_steps}"
                )
            await shipping
            scheduling.cancel()
            await self._cancel_episodes()
            # Nothing ends or is recorded behind these marks, so both loops drain and return.
            self._ended.put_nowait(None)
            await collecting
            self._drop_leftovers()
            self._to_record.put_nowait(None)
            await recording
            for watch in watches:
                watch.cancel()
        self._parts.journal.write(JournalEvent.RUN_ENDED, step=last_step)

    # ---------------------------------------------------------------- schedule
    async def schedule(self, tasks: asyncio.TaskGroup) -> None:
        """Start episodes, oldest group first; open a group when all planned ones started.

        consumes: tasks                waits for: a free slot and room in flight
        produces: running episodes     unblocked by: collect, refresh
        """
        while True:
            while (planned := self._scheduler.next_episode()) is not None:
                self._start_episode(planned, tasks)
            if self._scheduler.wants_group and self._ledger.free_slots > 0:
                await self._open_group()
                continue
            self._room.clear()
            await self._room.wait()

    async def _open_group(self) -> None:
        pointer = self._tasks.next_task()
        source = self._parts.sources[pointer.source]
        task = await source.environment.task(pointer.index)
        group = Group(f"g{self._num_opened:06d}", pointer, task)
        self._num_opened += 1
        self._groups[group.id] = group
        self._scheduler.plan(group.id, self._ledger.open(group.id, size=source.group_size))
        self._parts.journal.write(
            JournalEvent.GROUP_OPENED,
            group=group.id,
            source=pointer.source,
            index=pointer.index,
            key=task.key,
            pass_number=pointer.pass_number,
        )

    def _start_episode(self, planned: PlannedEpisode, tasks: asyncio.TaskGroup) -> None:
        version = self._parts.policy.version
        self._ledger.start(planned.id, version=version)
        self._parts.journal.write(JournalEvent.EPISODE_STARTED, episode=planned.id, version=version)
        playing = tasks.create_task(self._play_episode(planned, version))
        self._running[planned.id] = playing
        playing.add_done_callback(partial(self._note_end, planned, version))

    async def _play_episode(self, planned: PlannedEpisode, version: int) -> PlayedEpisode:
        group = self._groups[planned.group_id]
        source = self._parts.sources[group.source]
        try:
            episode = await source.environment.run(group.task, version=version)
        except EpisodeFailed as failed:
            return PlayedEpisode(
                planned.id, planned.group_id, self._span(version), failure=failed.failure
            )
        failure = find_failure(episode)
        if failure is None:
            await source.grading.algorithm.score_episode(episode)
        return PlayedEpisode(
            planned.id, planned.group_id, self._span(version), episode=episode, failure=failure
        )

    def _note_end(
        self, planned: PlannedEpisode, version: int, playing: asyncio.Task[PlayedEpisode]
    ) -> None:
        """Runs also for an episode that was cancelled before its first line."""
        del self._running[planned.id]
        if playing.cancelled():
            ended = PlayedEpisode(planned.id, planned.group_id, self._span(version))
            self._ended.put_nowait(ended)
        elif playing.exception() is None:
            self._ended.put_nowait(playing.result())

    def _span(self, version: int) -> VersionSpan:
        """From the version at the start to the newest that may have answered until now."""
        return VersionSpan(oldest=version, newest=self._parts.policy.newest_version)

    # ----------------------------------------------------------------- collect
    async def collect(self) -> None:
        """Settle ended episodes; grade each group when its last one ended.

        consumes: ended episodes           waits for: the next one
        produces: samples for a batch      unblocked by: environments
        """
        while (played := await self._ended.get()) is not None:
            self._settle(played)
            self._room.set()

    def _settle(self, played: PlayedEpisode) -> None:
        group = self._groups[played.group_id]
        group.played.append(played)
        self._scheduler.ended()
        is_complete = self._ledger.end(played.id, played.outcome)
        self._parts.journal.write(
            JournalEvent.EPISODE_ENDED,
            episode=played.id,
            outcome=played.outcome,
            version=played.versions.newest,
            error=played.failure.kind if played.failure else None,
        )
        if is_complete:
            self._grade(group)
        else:
            self._close_if_abandoned(group)

    def _grade(self, group: Group) -> None:
        grade(group, self._parts.sources[group.source].grading)
        if group.samples:
            self._note_stale(self._batcher.add(ReadyGroup(group.id, tuple(group.samples))))
            return
        self._drop(group)
        self._batcher.reject(group.reasons)

    def _drop(self, group: Group) -> None:
        """The group trains nothing: free its slot for a replacement."""
        self._ledger.drop(group.id)
        self._parts.journal.write(
            JournalEvent.GROUP_DROPPED, group=group.id, reasons=dict(group.reasons)
        )
        self._close(group, self._batcher.step)

    def _close(self, group: Group, step: int) -> None:
        """Count and record a group to which nothing more can happen."""
        del self._groups[group.id]
        self._tally.add_group(group)
        self._to_record.put_nowait(_EpisodesToRecord(group, step))

    def _note_stale(self, stale: StaleDrop) -> None:
        """Samples became too old in the queue; a group of which nothing is left goes."""
        if not stale.samples:
            return
        sample_ids = [sample.id for sample in stale.samples]
        self._parts.journal.write(JournalEvent.SAMPLES_DROPPED, samples=sample_ids, reason=STALE)
        for sample in stale.samples:
            self._groups[sample.group_id].dropped[sample.id] = STALE
        for group_id in stale.group_ids:
            self._drop(self._groups[group_id])
        self._room.set()

    # -------------------------------------------------------------------- ship
    async def ship(self) -> None:
        """Send each full batch to the trainer, in step order; ends after the last step.

        consumes: full batches             waits for: a full batch, room in the transport
        produces: micro batches            unblocked by: collect, the trainer's receive
        """
        for _ in range(self._config.max_steps):
            begun = self._parts.clock()
            batch = await self._batcher.next_batch()
            # Before slots were free the trainer was waited for, not the episodes.
            waited = self._parts.clock() - max(begun, self._slots_freed_at)
            self._close_batch(batch, waited)
            self._note_stale(self._batcher.drop_stale())
            self._abandon_too_old()
            wire_batch = build_batch(
                batch.samples, step=batch.step, epoch=self._config.epoch, layout=self._layout
            )
            self._parts.check_lease()
            self._num_shipped = batch.step + 1
            self._trainer_owes.set()
            await self._parts.sender.send(wire_batch)
            self._parts.journal.write(
                JournalEvent.BATCH_SHIPPED,
                step=batch.step,
                groups=batch.group_ids,
                samples=[sample.id for sample in batch.samples],
            )

    def _close_batch(self, batch: SampleBatch, waited_seconds: float) -> None:
        self._ledger.ship(batch.group_ids, step=batch.step)
        for group_id in batch.group_ids:
            self._close(self._groups[group_id], batch.step)
        metrics = self._tally.take() | batch_metrics(batch.samples, step=batch.step)
        metrics["time/generate_wait_seconds"] = waited_seconds
        self._steps.shipped(batch.step, metrics)

    def _abandon_too_old(self) -> None:
        """Give up groups that no batch to come can train, so that their compute is free."""
        too_old = self._ledger.must_end_too_old(
            step=self._batcher.step, max_staleness=self._config.orchestrator.max_staleness
        )
        for group_id in too_old:
            group = self._groups[group_id]
            self._parts.journal.write(JournalEvent.GROUP_ABANDONED, group=group_id)
            self._tally.add_abandoned(group.source)
            self._scheduler.forget(group_id)
            for episode_id in self._ledger.abandon(group_id):
                # An episode that ended a moment ago is no longer here; it is collected as it is.
                if episode_id in self._running:
                    self._running[episode_id].cancel()
            self._close_if_abandoned(group)
            self._room.set()

    def _close_if_abandoned(self, group: Group) -> None:
        """An abandoned group is final when its last running episode ended."""
        if self._ledger.phase(group.id) is Phase.GONE:
            give_up(group, ABANDONED)
            self._close(group, self._batcher.step)

    # ----------------------------------------------------------------- refresh
    async def refresh(self) -> int:
        """Follow the trainer: serve what it publishes, free slots; returns its last step.

        consumes: events of the trainer        waits for: the next one, inference
        produces: a live version, free slots   unblocked by: the trainer
        """
        while True:
            event = await self._next_event()
            match event:
                case BatchReceived(step=step):
                    self._parts.journal.write(JournalEvent.BATCH_RECEIVED, step=step)
                case StepFinished(step=step, metrics=metrics):
                    self._parts.journal.write(JournalEvent.STEP_FINISHED, step=step)
                    self._num_finished = step + 1
                    self._note_answer()
                    self._record_metrics(step, self._steps.finished(step, metrics))
                case PolicyPublished():
                    await self._serve(event)
                case TrainerDone(step=step):
                    return step

    async def _next_event(self) -> Event:
        """The trainer is silent without a batch; with one it must answer before the deadline."""
        await self._trainer_owes.wait()
        seconds = self._config.orchestrator.trainer_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._parts.sender.receive_event()
        except TimeoutError as error:
            raise DeadlineError(
                f"the trainer said nothing for {seconds:g} s although batch "
                f"{self._num_shipped - 1} was sent; see logs/trainer.log or raise "
                "orchestrator.trainer_timeout_seconds"
            ) from error

    def _note_answer(self) -> None:
        """With every batch trained and published, the trainer may be silent until the next one."""
        answered = min(self._num_finished, self._num_served)
        if answered == self._num_shipped < self._config.max_steps:
            self._trainer_owes.clear()

    async def _serve(self, published: PolicyPublished) -> None:
        if published.version > self._num_shipped:
            raise ProtocolError(
                f"the trainer published version {published.version}, "
                f"but only {self._num_shipped} batches were sent"
            )
        self._abandon_too_old()
        applied = await self._parts.policy.apply(published)
        freed = self._ledger.release_trained(version=applied.version)
        self._parts.journal.write(
            JournalEvent.POLICY_APPLIED, version=applied.version, slots_freed=freed
        )
        self._slots_freed_at = self._parts.clock()
        self._room.set()
        self._num_served = applied.version
        self._note_answer()
        metrics = self._steps.applied(applied, now=self._slots_freed_at)
        self._record_metrics(applied.version - 1, metrics)

    def _record_metrics(self, step: int, metrics: Metrics | None) -> None:
        if metrics is not None:
            self._to_record.put_nowait(_MetricsToRecord(metrics, step))

    # ------------------------------------------------------------------ record
    async def record(self) -> None:
        """Write what is final, one episode at a time, so that the other loops stay quick.

        consumes: final groups and steps    waits for: the next one
        produces: lines on disk             unblocked by: collect, ship, refresh
        """
        while (entry := await self._to_record.get()) is not None:
            if isinstance(entry, _MetricsToRecord):
                self._parts.check_lease()
                self._parts.monitor.record(entry.metrics, step=entry.step)
                continue
            for played in entry.group.played:
                self._parts.episodes.write(played, entry.group, step=entry.step)
                await asyncio.sleep(0)

    # --------------------------------------------------------------------- end
    async def _cancel_episodes(self) -> None:
        running = list(self._running.values())
        for playing in running:
            playing.cancel()
        if running:
            await asyncio.wait(running)

    def _drop_leftovers(self) -> None:
        """What was played for batches that the run does not need any more."""
        for group in list(self._groups.values()):
            give_up(group, RUN_ENDED)
            self._parts.journal.write(
                JournalEvent.GROUP_DROPPED, group=group.id, reasons=dict(group.reasons)
            )
            self._close(group, self._batcher.step)

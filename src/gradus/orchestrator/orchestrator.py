"""The orchestrator plays tasks, scores groups, ships batches and keeps the served policy fresh.

Six loops in one task group; none polls, none looks at a flag:

    loop      consumes            waits for                    produces             unblocked by
    schedule  tasks               a free slot, room in flight  running episodes     collect, refresh
    collect   ended episodes      its group to be complete     samples for a batch  environments
    ship      full batches        room in the transport        micro batches        collect, trainer
    refresh   the trainer's news  inference, a new version     free slots           trainer
    record    what is final       the next one                 lines on disk        all others
    evaluate  versions to judge   its episodes                 metrics              refresh

The run ends when the trainer says that it applied its last step.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from gradus.config import OrchestratorProcessConfig
from gradus.errors import DeadlineError, ProtocolError
from gradus.files import write_atomically, write_json
from gradus.orchestrator.build import Components, connect
from gradus.orchestrator.evaluation.evaluator import EvaluationInRun
from gradus.orchestrator.failures import FirstFailures, root_cause
from gradus.orchestrator.groups.batcher import Batcher, SampleBatch
from gradus.orchestrator.groups.open_groups import GroupBuffer
from gradus.orchestrator.groups.packing import Layout, build_batch
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.play.concurrency import (
    AdmissionRate,
    EngineWatch,
    InFlightController,
    Scheduler,
    build_controller,
)
from gradus.orchestrator.play.player import EpisodePlayer
from gradus.orchestrator.play.restarts import Blame
from gradus.orchestrator.play.task_socket import TaskRefused
from gradus.orchestrator.play.tasks import TaskQueue, TaskSource
from gradus.orchestrator.records.batch_digest import digest_samples
from gradus.orchestrator.records.journal import JournalEvent
from gradus.orchestrator.records.metrics import PendingStepMetrics, StepCounters
from gradus.orchestrator.records.starvation import Starvation
from gradus.orchestrator.records.watchdog import (
    WaitBoard,
    WaitFor,
    Watchdog,
    describe_chain,
    guard_event_loop,
)
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.resume.checkpoint import SavedOrchestrator, build_writer, find_saved
from gradus.orchestrator.resume.snapshot import Snapshotter
from gradus.orchestrator.types import Group
from gradus.processes.child import tune_collector
from gradus.processes.liveness import BEAT_SECONDS, beat
from gradus.run.paths import RunDirectory
from gradus.run.recording import weights_digest
from gradus.wire.events import (
    BatchReceived,
    CheckpointStaged,
    Event,
    PolicyPublished,
    StepFinished,
    TrainerDone,
)
from gradus.wire.micro_batch import Batch


def run(config: OrchestratorProcessConfig) -> None:
    """The orchestrator process, from its ready file to the trainer's last step."""
    try:
        asyncio.run(_run(config))
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


async def _run(config: OrchestratorProcessConfig) -> None:
    async with connect(config) as parts:
        run_dir = RunDirectory(Path(config.run_dir))
        saved = find_saved(config)
        ready = {"pid": os.getpid(), "term": config.term}
        run_dir.evicted.unlink(missing_ok=True)
        write_json(run_dir.ready_file("orchestrator"), ready)
        tune_collector()
        orchestrator = Orchestrator(config, parts, saved)
        watches = [
            asyncio.create_task(guard_event_loop(config.orchestrator.watchdog)),
            asyncio.create_task(beat(run_dir.alive, "orchestrator", orchestrator.silent)),
        ]
        try:
            await orchestrator.play()
            parts.recording.finish()
        finally:
            for watch in watches:
                watch.cancel()


class Orchestrator:
    """Owns the loops and what they share; every part is handed in complete.

    >>> await Orchestrator(config, parts).play()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: OrchestratorProcessConfig,
        parts: Components,
        saved: SavedOrchestrator | None = None,
    ) -> None:
        """`saved` is what a resumed run goes on from; the journal says so at once."""
        settings = config.orchestrator
        self._config = config
        self._parts = parts
        self._first_step = saved.state.step if saved else 0
        self._scoring: set[asyncio.Task[None]] = set()
        self._tasks = TaskSource([s.share for s in parts.sources.values()], seed=config.seed)
        controller = build_controller(config, parts.policy.kv_capacity_tokens)
        self._scheduler = Scheduler(
            max_in_flight=controller.limit,
            rate=AdmissionRate(per_minute=settings.max_episodes_per_minute),
        )
        self._batcher = Batcher(
            groups_per_batch=settings.groups_per_batch,
            max_staleness=settings.max_staleness,
            max_empty_attempts=settings.max_empty_attempts,
            normalizes=settings.normalize == "batch",
        )
        self._slots = GroupSlots(
            budget=(settings.max_lag + 1) * settings.groups_per_batch,
            total_groups=(config.max_steps - self._first_step) * settings.groups_per_batch,
        )
        self._queue = TaskQueue(self._tasks)
        self._record_writer = RecordWriter(parts.monitor, parts.episodes, parts.check_lease)
        self._groups = GroupBuffer(
            sources=parts.sources,
            tasks=self._tasks,
            slots=self._slots,
            batcher=self._batcher,
            journal=parts.journal,
            recorder=self._record_writer,
            recording=parts.recording,
            counters=StepCounters(),
            starvation=Starvation(),
            failures=FirstFailures(RunDirectory(Path(config.run_dir)), "train"),
            evict=self._evict,
        )
        self._board = WaitBoard(clock=parts.clock)
        self._player = self._build_player()
        self._engine = self._build_engine_watch(controller)
        self._evaluation = self._build_evaluation()
        self._watchdog = Watchdog(self._board, settings.watchdog, oldest=self._oldest_episodes)
        self._layout = Layout.of(config)
        self._num_shipped = self._num_finished = self._num_served = self._first_step
        self._room, self._trainer_owes = asyncio.Event(), asyncio.Event()
        self._slots_freed_at = parts.clock()
        self._step_metrics = PendingStepMetrics(now=self._slots_freed_at)
        self._snapshotter = self._build_snapshotter(controller)
        self._checkpoint = build_writer(config, parts.journal)
        self._to_send = self._restore(saved, controller) if saved else []

    def _build_player(self) -> EpisodePlayer:
        return EpisodePlayer(
            self._parts.sources,
            self._parts.policy,
            on_retry=self._groups.retry,
            clock=self._parts.clock,
            seed=self._config.seed,
            blame=Blame(is_aside=self._tasks.is_aside, put_aside=self._groups.set_aside),
        )

    def _build_engine_watch(self, controller: InFlightController) -> EngineWatch:
        return EngineWatch(
            self._parts.policy,
            controller,
            count=self._count_episodes,
            on_limit=self._set_limit,
            on_tokens=self._board.moved,
        )

    def _build_snapshotter(self, controller: InFlightController) -> Snapshotter:
        sources = self._parts.sources.items()
        algorithms = {f"algorithm {name}": source.grader.algorithm for name, source in sources}
        return Snapshotter(
            run_dir=RunDirectory(Path(self._config.run_dir)),
            pieces={
                "tasks": self._tasks,
                "slots": self._slots,
                "counters": self._groups.counters,
                "starvation": self._groups.starvation,
                "steps": self._step_metrics,
                "evaluation": self._evaluation,
                "in_flight_limit": controller,
                **algorithms,
            },
            queue=self._queue,
            batcher=self._batcher,
            slots=self._slots,
            groups=self._groups.groups,
            recorder=self._record_writer,
            journal=self._parts.journal,
        )

    def _restore(
        self, saved: SavedOrchestrator, controller: InFlightController
    ) -> list[SampleBatch]:
        """The batches that the trainer needs again."""
        batches = self._snapshotter.restore(saved)
        self._scheduler.max_in_flight = controller.limit
        return batches

    def _build_evaluation(self) -> EvaluationInRun:
        return EvaluationInRun(
            self._config.orchestrator.eval,
            self._parts.evaluated,
            policy=self._parts.policy,
            recorder=self._record_writer,
            journal=self._parts.journal,
            run_dir=RunDirectory(Path(self._config.run_dir)),
        )

    async def play(self) -> None:
        """Run all loops until the trainer is done; the first error ends them all."""
        if not self._first_step:
            self._parts.journal.write(JournalEvent.RUN_STARTED, version=self._parts.policy.version)
        async with asyncio.TaskGroup() as tasks:
            played = [source.environment for source in self._parts.sources.values()]
            played += [source.environment for source in self._parts.evaluated]
            watches = [tasks.create_task(environment.watch()) for environment in played]
            watches.append(tasks.create_task(self._evaluation.run()))
            if self._first_step:
                await self._serve_again()
            self._evaluation.begin_if_due(self._parts.policy.version, is_first=True)
            scheduling = tasks.create_task(self.schedule(tasks))
            collecting = tasks.create_task(self.collect(tasks))
            shipping = tasks.create_task(self.ship())
            recording = tasks.create_task(self._record_writer.run())
            watches.append(tasks.create_task(self._engine.run()))
            watches.append(tasks.create_task(self._watchdog.run()))
            last_step = await self.refresh(tasks)
            if self._num_shipped < self._config.max_steps:
                raise ProtocolError(
                    f"the trainer left after step {last_step}, the run has {self._config.max_steps}"
                )
            await shipping
            scheduling.cancel()
            # Nothing ends or is recorded behind these marks, so both loops drain and return.
            await self._player.close()
            await collecting
            await self._end_scoring()
            self._evaluation.begin_if_due(self._parts.policy.version, is_last=True)
            await self._evaluation.released()
            self._groups.drop_leftovers()
            self._record_writer.close()
            await recording
            for watch in watches:
                watch.cancel()
        self._parts.journal.write(JournalEvent.RUN_ENDED, step=last_step)

    def silent(self) -> dict[str, str]:
        """Who lets the run wait, for the launcher to say."""
        found = {}
        if self._board.quiet_seconds >= BEAT_SECONDS:
            found["the run"] = f"waits: {describe_chain(self._board.waits())}"
        if self._engine.is_silent:
            found["inference"] = "has not answered"
        return found

    def _evict(self, reason: str) -> None:
        evicted = RunDirectory(Path(self._config.run_dir)).evicted
        write_atomically(evicted, f"{reason}\n".encode())

    # ---------------------------------------------------------------- schedule
    async def schedule(self, tasks: asyncio.TaskGroup) -> None:
        """Start episodes, oldest group first; open a group when all planned ones started.

        consumes: tasks                waits for: a free slot and room in flight
        produces: running episodes     unblocked by: collect, refresh
        """
        while True:
            while (planned := self._scheduler.next_episode(now=self._parts.clock())) is not None:
                group = self._groups.groups[planned.group_id]
                version = self._player.start(planned.id, group, tasks)
                self._groups.start(planned.id, version=version)
                self._board.moved()
            held_back = self._scheduler.wait_seconds(now=self._parts.clock())
            if not held_back and self._scheduler.wants_group and self._slots.free_slots > 0:
                await self._open_group()
                continue
            self._room.clear()
            if held_back:
                asyncio.get_running_loop().call_later(held_back, self._room.set)
            with self._board.waiting("schedule", self._schedule_wait, is_progress=False):
                await self._room.wait()

    def _schedule_wait(self) -> WaitFor:
        if self._slots.free_slots == 0 and self._scheduler.wants_group:
            return WaitFor("a free slot", on="refresh")
        if self._scheduler.in_flight >= self._scheduler.max_in_flight:
            return WaitFor("room in flight", on="collect")
        return WaitFor("the rate of starts", on="time")

    def _collect_wait(self) -> WaitFor:
        running = self._player.running
        if not running and self._scoring:
            return WaitFor("a group to be scored", on="its algorithm")
        if not running:
            return WaitFor("an episode to start", on="schedule")
        return WaitFor("an episode to end", on=f"environment {running[0].group.source!r}")

    def _oldest_episodes(self) -> list[str]:
        now = self._parts.clock()
        return [episode.text(now=now) for episode in self._player.running]

    async def _open_group(self) -> None:
        draw = self._queue.next()
        pointer = draw.task
        asked = WaitFor(f"task {pointer.index}", on=f"environment {pointer.source!r}")
        try:
            with self._board.waiting("schedule", asked):
                task = await self._parts.sources[pointer.source].environment.task(pointer.index)
        except TaskRefused as error:
            self._groups.note_unreadable(pointer, error)
            self._queue.redraw(draw)
            return
        group, episode_ids = self._groups.open(pointer, task, number=draw.number)
        self._queue.opened(draw)
        self._scheduler.plan(group.id, episode_ids)
        # Thousands of slots may become free at once; the other loops get their turn in between.
        await asyncio.sleep(0)

    def _count_episodes(self) -> tuple[int, int]:
        return self._scheduler.in_flight, self._slots.ended.total()

    def _set_limit(self, limit: int) -> None:
        self._scheduler.max_in_flight = limit
        self._room.set()

    # ----------------------------------------------------------------- collect
    async def collect(self, tasks: asyncio.TaskGroup) -> None:
        """Settle ended episodes; grade each group when its last one ended, or begin to score it.

        consumes: ended episodes           waits for: the next one
        produces: samples for a batch      unblocked by: environments
        """
        while True:
            with self._board.waiting("collect", self._collect_wait):
                played = await self._player.ended.get()
            if played is None:
                return
            self._scheduler.ended()
            complete = self._groups.settle(played)
            if complete is not None:
                self._score(complete, tasks)
            self._room.set()
            # SourceGrader a group takes milliseconds, and the queue may be long.
            await asyncio.sleep(0)

    def _score(self, group: Group, tasks: asyncio.TaskGroup) -> None:
        """Beside all loops: a judge may take minutes."""

        async def score() -> None:
            await self._groups.score(group)
            self._board.moved()
            self._room.set()

        scoring = tasks.create_task(score())
        self._scoring.add(scoring)
        scoring.add_done_callback(self._scoring.discard)

    async def _end_scoring(self) -> None:
        """Groups that are still being scored train nothing."""
        for scoring in (running := list(self._scoring)):
            scoring.cancel()
        if running:
            await asyncio.wait(running)

    # -------------------------------------------------------------------- ship
    async def ship(self) -> None:
        """Send each full batch to the trainer, in step order; ends after the last step.

        consumes: full batches             waits for: a full batch, room in the transport
        produces: micro batches            unblocked by: collect, the trainer's receive
        """
        for batch in self._to_send:
            await self._send(batch)
        while self._num_shipped < self._config.max_steps:
            begun = self._parts.clock()
            with self._board.waiting("ship", WaitFor("a full batch", on="collect")):
                batch = await self._batcher.next_batch()
            self._snapshotter.cut(batch)
            self._parts.journal.write(
                JournalEvent.BATCH_CUT, step=batch.step, groups=batch.group_ids
            )
            # Before slots were free the trainer was waited for, not the episodes.
            waited = self._parts.clock() - max(begun, self._slots_freed_at)
            metrics = self._groups.ship(batch) | {"time/generate_wait_seconds": waited}
            self._step_metrics.shipped(batch.step, metrics)
            self._groups.drop_stale()
            self._abandon_too_old()
            await self._send(batch)

    async def _send(self, batch: SampleBatch) -> None:
        wire_batch, digests = await asyncio.to_thread(self._pack, batch)
        self._parts.check_lease()
        self._num_shipped = batch.step + 1
        self._trainer_owes.set()
        with self._board.waiting("ship", WaitFor("room in the transport", on="trainer")):
            await self._parts.sender.send(wire_batch)
        self._parts.journal.write(
            JournalEvent.BATCH_SHIPPED,
            step=batch.step,
            groups=batch.group_ids,
            samples=[sample.id for sample in batch.samples],
            digests=digests,
        )

    def _pack(self, batch: SampleBatch) -> tuple[Batch, dict[str, str]]:
        """On a thread: it takes up to seconds, in which all loops would stand still."""
        samples, term = batch.samples, self._config.term
        packed = build_batch(samples, step=batch.step, term=term, layout=self._layout)
        return packed, digest_samples(samples)

    def _abandon_too_old(self) -> None:
        abandoned = self._groups.abandon_too_old(
            max_staleness=self._config.orchestrator.max_staleness
        )
        for group_id in abandoned.group_ids:
            self._scheduler.forget(group_id)
        self._player.cancel(abandoned.running)
        self._room.set()

    # ----------------------------------------------------------------- refresh
    async def _serve_again(self) -> None:
        """Inference starts from the initial weights: serve the checkpoint's before any episode."""
        self._trainer_owes.set()
        event = await self._next_event()
        if not isinstance(event, PolicyPublished) or event.version != self._first_step:
            raise ProtocolError(
                f"a resumed trainer must publish version {self._first_step} first, not {event}"
            )
        weights = weights_digest(Path(event.directory))
        applied = await self._parts.policy.apply(event)
        self._parts.journal.write(
            JournalEvent.POLICY_APPLIED, version=applied.version, weights=weights
        )
        self._slots_freed_at = self._parts.clock()
        metrics = self._step_metrics.applied_again(applied, now=self._slots_freed_at)
        self._record_writer.add_metrics(metrics, step=applied.version - 1)
        if self._num_shipped < self._config.max_steps:
            self._trainer_owes.clear()

    async def refresh(self, tasks: asyncio.TaskGroup) -> int:
        """Follow the trainer: serve what it publishes, free slots; returns its last step.

        consumes: events of the trainer        waits for: the next one, inference
        produces: a live version, free slots   unblocked by: the trainer
        """
        while True:
            event = await self._next_event()
            match event:
                case BatchReceived(step=step):
                    self._parts.journal.write(JournalEvent.BATCH_RECEIVED, step=step)
                case StepFinished(step=step, metrics=metrics, is_saved=is_saved):
                    self._parts.journal.write(JournalEvent.STEP_FINISHED, step=step)
                    self._num_finished = step + 1
                    self._note_answer()
                    self._record_writer.add_metrics(
                        self._step_metrics.finished(step, metrics), step=step
                    )
                    self._snapshotter.trained(step)
                    if is_saved:
                        self._take_snapshot(step + 1)
                case CheckpointStaged(step=step):
                    tasks.create_task(self._checkpoint.commit(self._checkpoint.staged(step)))
                case PolicyPublished():
                    await self._serve(event)
                case TrainerDone(step=step):
                    return step

    def _take_snapshot(self, version: int) -> None:
        snapshot = self._snapshotter.snapshot(version, max_steps=self._config.max_steps)
        self._checkpoint.take(version, snapshot)

    async def _next_event(self) -> Event:
        """The trainer is silent without a batch; with one it must answer before the deadline."""
        seconds = self._config.orchestrator.trainer_timeout_seconds
        receiving = asyncio.ensure_future(self._parts.sender.receive_event())
        owes = asyncio.ensure_future(self._trainer_owes.wait())
        try:
            nothing_owed = WaitFor(f"batch {self._num_shipped} to be sent", on="ship")
            with self._board.waiting("refresh", nothing_owed, is_progress=False):
                await asyncio.wait({receiving, owes}, return_when=asyncio.FIRST_COMPLETED)
            with self._board.waiting("refresh", WaitFor("the trainer's next word", on="trainer")):
                async with asyncio.timeout(seconds):
                    return await receiving
        except TimeoutError as error:
            raise DeadlineError(
                f"the trainer said nothing for {seconds:g} s although batch "
                f"{self._num_shipped - 1} was sent; see logs/trainer.log or raise "
                "orchestrator.trainer_timeout_seconds"
            ) from error
        finally:
            owes.cancel()
            receiving.cancel()

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
        held = WaitFor("the evaluation of the version served now", on="evaluation")
        with self._board.waiting("refresh", held):
            seconds = await self._evaluation.released()
        self._step_metrics.held(published.version - 1, seconds)
        self._abandon_too_old()
        to_serve = WaitFor(f"version {published.version} to be served", on="inference")
        weights = weights_digest(Path(published.directory))
        with self._board.waiting("refresh", to_serve):
            applied = await self._parts.policy.apply(published)
        self._evaluation.begin_if_due(applied.version)
        freed = self._slots.release_trained(version=applied.version)
        self._parts.journal.write(
            JournalEvent.POLICY_APPLIED,
            version=applied.version,
            slots_freed=freed,
            weights=weights,
        )
        self._slots_freed_at = self._parts.clock()
        self._room.set()
        self._num_served = applied.version
        self._note_answer()
        self._step_metrics.shipped(applied.version - 1, self._engine.take())
        metrics = self._step_metrics.applied(applied, now=self._slots_freed_at)
        self._record_writer.add_metrics(metrics, step=applied.version - 1)

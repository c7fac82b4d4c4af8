"""Every group that is not final: who moves it from state to state, and who frees its slot.

    open ─► OPEN ── settle: its episodes ended ─► SCORING ── graded ─► COMPLETE ── ship ─► SHIPPED
             │                                                            │                  │
             │ abandon_too_old                  no sample to train, or all are too old       │
             ▼                                                            ▼                  │
           GONE, its slot is free ◄───────────────────────────────────────┴──────────────────┘
                                                       inference serves a version trained on it

A slot (`groups/slots.py`) is freed once: when inference serves a version trained on its group, when
a graded group has nothing to train, or at once when a group is abandoned because its oldest episode
began more than `max_staleness` versions before the batch that fills now. Episodes of an abandoned
group that still run are cancelled. The task of a group that took too long goes back to its source.
Each change is a line of the journal. Next page: `groups/grading.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradus.log import get_logger
from gradus.orchestrator.failures import FirstFailures
from gradus.orchestrator.groups.batcher import (
    Batcher,
    ReadyGroup,
    SampleBatch,
    StaleDrop,
)
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.groups.solved import RewardRanges
from gradus.orchestrator.play.curriculum import Ending, TaskResult
from gradus.orchestrator.play.environment import TaskRefused
from gradus.orchestrator.play.player import RunningEpisode, Source
from gradus.orchestrator.play.tasks import Draw, TaskQueue, TaskSource
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.metrics import (
    TRAINABLE_SHARE,
    Metrics,
    StepCounters,
    batch_metrics,
)
from gradus.orchestrator.records.probe import StartProbe
from gradus.orchestrator.records.recording import EpisodeRecording
from gradus.orchestrator.records.starvation import Starvation, group_time
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.types import (
    ABANDONED,
    ERROR_PREFIX,
    RUN_ENDED,
    STALE,
    EpisodeFailed,
    Failure,
    Group,
    GroupPhase,
    PlayedEpisode,
    TaskPointer,
)

UNREADABLE = "unreadable"
"""Why a task is set aside that its environment cannot load."""
TOO_OLD = "too_old"
"""Why a running group is abandoned: the next batch cannot train its oldest episode any more."""
LEAST_TRAINABLE_SHARE = 0.1
"""Warn about a batch of which filters leave this share of the samples, or less."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Abandoned:
    """Groups that were given up, and what of them still runs."""

    group_ids: list[str]
    running: list[str]
    """Ids of the episodes to cancel."""


@dataclass(frozen=True)
class GroupBuffer:
    """Owns every group that is not final, and moves it between slots, batcher and records."""

    sources: Mapping[str, Source]
    tasks: TaskSource
    queue: TaskQueue
    slots: GroupSlots
    batcher: Batcher
    journal: Journal
    records: RecordWriter
    recording: EpisodeRecording | None
    """What a replay needs of each episode."""
    failures: FirstFailures
    rewards: RewardRanges
    probe: StartProbe
    counters: StepCounters = field(default_factory=StepCounters)
    starvation: Starvation = field(default_factory=Starvation)
    groups: dict[str, Group] = field(default_factory=dict)
    """By id."""

    async def open(self, draw: Draw) -> tuple[Group, list[str]] | None:
        """Load the task of `draw` and take a slot for it: the group and the ids of its episodes.

        None when the environment refuses the task: another one gets the draw's number.
        EnvironmentFailure after many of those in a row.
        """
        pointer = draw.task
        source = self.sources[pointer.source]
        try:
            task = await source.environment.task(pointer.index)
        except TaskRefused as error:
            self.set_aside(pointer, UNREADABLE, f"{error}")
            self.batcher.reject({f"{ERROR_PREFIX}{UNREADABLE}_task": 1})
            self.queue.redraw(draw)
            return None
        group = Group(f"g{draw.number:06d}", pointer, task)
        self.groups[group.id] = group
        size = pointer.group_size or source.group_size
        episode_ids = self.slots.open(group.id, size=size, is_frozen=source.is_frozen)
        self.journal.write(
            JournalEvent.GROUP_OPENED,
            group=group.id,
            source=pointer.source,
            index=pointer.index,
            key=task.key,
            pass_number=pointer.pass_number,
            attempt=pointer.attempt,
            size=size,
        )
        self.queue.opened(draw)
        return group, episode_ids

    def set_aside(self, pointer: TaskPointer, reason: str, error: str) -> None:
        """Stop drawing a task that cannot be played."""
        if not self.tasks.set_aside(pointer):
            return
        self.journal.write(
            JournalEvent.TASK_SET_ASIDE,
            source=pointer.source,
            index=pointer.index,
            reason=reason,
            error=error,
        )
        self.counters.add("task", pointer.source, "set_aside", reason)
        self._record(pointer, TaskResult(Ending.SET_ASIDE))
        place = f"task {pointer.index}, set aside"
        self.failures.add(pointer.source, place, Failure(f"{reason} task", error))

    def start(self, episode_id: str, *, version: int) -> None:
        self.slots.start(episode_id, version=version)
        self.journal.write(JournalEvent.EPISODE_STARTED, episode=episode_id, version=version)

    def retry(self, episode: RunningEpisode, failure: Failure) -> None:
        self.slots.restart(episode.id, version=episode.version)
        self.counters.add("episode", episode.group.source, "retried", failure.kind)
        self._tell(episode.group, f"{episode.id}, played again", failure)
        self.journal.write(
            JournalEvent.EPISODE_RETRIED,
            episode=episode.id,
            version=episode.version,
            retry=episode.retry,
            error=failure.kind,
        )

    def settle(self, played: PlayedEpisode) -> Group | None:
        """An episode ended. With its last episode a group is complete, and is graded.

        Returns a complete group whose algorithm must be awaited: it is for `score`.
        """
        group = self.groups[played.group_id]
        awaits_groups = self.sources[group.source].grader.awaits_groups
        if not awaits_groups and self.recording is not None:
            self.recording.add(played)
        group.played.append(played)
        if played.failure is not None:
            self._tell(group, played.id, played.failure)
        self.counters.add_ended(group.source, played)
        self.probe.ended(group.source, played.outcome)
        is_complete = self.slots.end(played.id, played.outcome)
        self.journal.write(
            JournalEvent.EPISODE_ENDED,
            episode=played.id,
            outcome=played.outcome,
            version=played.versions.newest,
            error=played.failure.kind if played.failure else None,
        )
        if not is_complete:
            self._close_if_abandoned(group)
            return None
        if awaits_groups:
            return group
        self.sources[group.source].grader.grade(group)
        self._graded(group)
        return None

    async def score(self, group: Group) -> None:
        """Wait for the algorithm to score a complete group.

        Its episodes are recorded with their credit, because a replay cannot ask a judge again.
        """
        source = self.sources[group.source]
        await source.grader.grade_awaited(group, source.errors)
        if self.recording is not None:
            for played in group.played:
                self.recording.add(played)
        self._graded(group)

    def ship(self, batch: SampleBatch) -> Metrics:
        """Close the groups of `batch`; returns the metrics since the batch before."""
        self.journal.write(JournalEvent.BATCH_CUT, step=batch.step, groups=batch.group_ids)
        self.slots.ship(batch.group_ids, step=batch.step)
        self.probe.shipped()
        for group_id in batch.group_ids:
            self._close(self.groups[group_id], batch.step)
        metrics = self.counters.take(self.sources) | self.starvation.metrics()
        share = metrics.get(TRAINABLE_SHARE, 1.0)
        if share <= LEAST_TRAINABLE_SHARE:
            log.warning(
                "step %d: filters left %.0f %% of the samples to train; rewards may be equal "
                "in most groups. See sample/dropped in the metrics",
                batch.step,
                100 * share,
            )
        # Samples that are too old for the batch that fills now count with that one.
        self._note_stale(self.batcher.drop_stale())
        return metrics | batch_metrics(batch.samples, step=batch.step)

    def abandon_too_old(self) -> Abandoned:
        """Give up groups that no later batch can train, so that they stop using the engine.

        Their tasks go back to their sources.
        """
        too_old = self.slots.must_end_too_old(
            step=self.batcher.step, max_staleness=self.batcher.max_staleness
        )
        to_cancel: list[str] = []
        for group_id in too_old:
            group = self.groups[group_id]
            self.journal.write(JournalEvent.GROUP_ABANDONED, group=group_id, reason=TOO_OLD)
            self.counters.add("group", group.source, "abandoned", TOO_OLD)
            self._return_task(group)
            to_cancel += self.slots.abandon(group_id)
            self._close_if_abandoned(group)
        return Abandoned(too_old, to_cancel)

    def drop_leftovers(self) -> None:
        """Drop the groups that are left when the run has all its batches."""
        for group in list(self.groups.values()):
            group.give_up(RUN_ENDED)
            self.journal.write(
                JournalEvent.GROUP_DROPPED, group=group.id, reasons=dict(group.reasons)
            )
            self._close(group, self.batcher.step)

    def _tell(self, group: Group, episode: str, failure: Failure) -> None:
        place = f"task {group.pointer.index}, episode {episode}"
        self.failures.add(group.source, place, failure)

    def _record(self, pointer: TaskPointer, result: TaskResult) -> None:
        """Tell the curriculum about a task that trains nothing; if it fails, that is reported."""
        try:
            self.tasks.record(pointer, result)
        except EpisodeFailed as failed:
            self.failures.add(pointer.source, f"task {pointer.index}", failed.failure)

    def _graded(self, group: Group) -> None:
        """The group has its credit: it waits for a batch, or trains nothing."""
        self.slots.complete(group.id)
        try:
            result = TaskResult.of(group, Ending.PLAYED)
            self.tasks.record(group.pointer, result)
        except EpisodeFailed as failed:
            group.fail(failed.failure)
        if not self.sources[group.source].is_frozen:
            self.probe.add(group, result)
        is_solved = self.rewards.is_solved(group.source, result.rewards, size=len(group.played))
        for episode, failure in group.failures.items():
            self._tell(group, episode, failure)
        self.journal.write(
            JournalEvent.GROUP_GRADED,
            group=group.id,
            samples=[sample.id for sample in group.samples],
            error=group.failure.kind if group.failure else None,
        )
        if group.samples:
            is_frozen = self.sources[group.source].is_frozen
            ready = ReadyGroup(group.id, tuple(group.samples), is_frozen)
            stale = self.batcher.add(ready)
            self._note_stale(stale)
            if stale.group_ids:
                self.batcher.reject({STALE: len(stale.samples)})
            return
        self._drop(group)
        last = next((it.message for it in group.failures.values()), self.failures.first)
        self.batcher.reject(group.reasons, last=last, rewards=result.rewards, is_solved=is_solved)

    def _drop(self, group: Group) -> None:
        """The group trains nothing: free its slot for a replacement."""
        self.slots.drop(group.id)
        self.counters.add("group", group.source, "dropped")
        self.journal.write(JournalEvent.GROUP_DROPPED, group=group.id, reasons=dict(group.reasons))
        self._close(group, self.batcher.step)

    def _close(self, group: Group, step: int) -> None:
        del self.groups[group.id]
        self.counters.add_group(group)
        self.starvation.add(group.source, group_time(group))
        self.records.add_group(group, step=step)

    def _close_if_abandoned(self, group: Group) -> None:
        """An abandoned group is final when its last running episode ended."""
        if self.slots.phase(group.id) is GroupPhase.GONE:
            group.give_up(ABANDONED)
            self._close(group, self.batcher.step)

    def _note_stale(self, stale: StaleDrop) -> None:
        """Samples became too old in the queue; a group that has none left is dropped."""
        if not stale.samples:
            return
        sample_ids = [sample.id for sample in stale.samples]
        self.journal.write(JournalEvent.SAMPLES_DROPPED, samples=sample_ids, reason=STALE)
        for sample in stale.samples:
            self.groups[sample.group_id].dropped[sample.id] = STALE
        for group_id in stale.group_ids:
            self._return_task(self.groups[group_id])
            self._drop(self.groups[group_id])

    def _return_task(self, group: Group) -> None:
        """The group took too long to train: its task is drawn again, a few times."""
        self._record(group.pointer, TaskResult.of(group, Ending.TOO_OLD))
        if self.tasks.give_back(group.pointer):
            self.journal.write(JournalEvent.TASK_RETURNED, group=group.id)
            return
        self.counters.add("task", group.source, "given_up")
        self.journal.write(JournalEvent.TASK_GIVEN_UP, group=group.id)

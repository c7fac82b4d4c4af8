"""Takes snapshots of the orchestrator at one moment, and restores them."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import msgspec

from gradus.orchestrator.groups.batcher import Batcher, ReadyGroup, SampleBatch
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.play.tasks import Draw, TaskQueue
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.recording import load_played, save_played
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.resume.checkpoint import (
    FORMAT,
    CheckpointWriter,
    OpenGroup,
    OrchestratorState,
    PendingSamples,
    SavedBatch,
    SavedGroup,
    SavedOrchestrator,
    SavedSamples,
    Snapshot,
    Stateful,
    load_pieces,
    take_states,
)
from gradus.orchestrator.types import Group, GroupPhase, Task, TaskPointer
from gradus.plugins import with_name
from gradus.run.growing_files import note_sizes
from gradus.run.paths import RunDirectory
from gradus.wire.codec import encode


@dataclass
class Snapshotter:
    """Reads and restores the parts that outlive a step; owns the batches that are not trained yet.

    >>> snapshotter.cut(batch)  # doctest: +SKIP
    >>> snapshotter.trained(batch.step, is_saved=True)  # doctest: +SKIP
    >>> await snapshotter.commit(batch.step + 1)  # doctest: +SKIP
    """

    run_dir: RunDirectory
    pieces: Mapping[str, Stateful]
    queue: TaskQueue
    batcher: Batcher
    slots: GroupSlots
    groups: dict[str, Group]
    """Every group that is not final, by id."""
    records: RecordWriter
    journal: Journal
    checkpoints: CheckpointWriter
    max_steps: int
    _untrained: dict[int, SampleBatch] = field(default_factory=dict)

    def cut(self, batch: SampleBatch) -> None:
        """A batch was taken out of the queue."""
        self._untrained[batch.step] = batch

    def trained(self, step: int, *, is_saved: bool) -> None:
        """The trainer finished `step`; it saves the version that the step made if `is_saved`."""
        self._untrained.pop(step, None)
        if is_saved:
            self.checkpoints.take(step + 1, self.snapshot(step + 1))

    def commit(self, version: int) -> Coroutine[Any, Any, None]:
        """Make a checkpoint of the snapshot of `version`, now that the trainer's part is staged."""
        return self.checkpoints.commit(self.checkpoints.staged(version))

    def snapshot(self, step: int) -> Snapshot:
        """Everything at this moment, which must be the one when `step` steps are trained."""
        state = OrchestratorState(
            format=FORMAT,
            step=step,
            max_steps=self.max_steps,
            journal_lines=self.journal.num_lines,
            num_drawn=self.queue.num_drawn,
            open_groups=[OpenGroup(d.number, asdict(d.task)) for d in self._to_play_again()],
            cut_off=self.slots.abandoned(),
            batcher=self.batcher.state(),
            pieces=take_states(self.pieces),
        )
        batches = [self._untrained[s] for s in sorted(self._untrained)]
        pending = PendingSamples(
            [SavedBatch(b.step, [_save_samples(g) for g in b.groups]) for b in batches],
            [_save_group(self.groups[ready.id], ready) for ready in self.batcher.ready],
        )
        sizes = self.records.mark(partial(note_sizes, self.run_dir, step))
        return Snapshot(step, msgspec.json.encode(state), encode(pending), sizes)

    def restore(self, saved: SavedOrchestrator) -> list[SampleBatch]:
        """Go on from `saved`; the batches that the trainer needs again."""
        load_pieces(self.pieces, saved.state.pieces)
        interrupted = with_name("open groups", lambda: _draws(saved.state.open_groups))
        self.queue.restore(interrupted, num_drawn=saved.state.num_drawn)
        for group in saved.pending.groups:
            restored = with_name(f"group {group.ready.group_id}", partial(_load_group, group))
            self.groups[restored.id] = restored
            self.slots.restore(restored.id)
        ready = [_load_samples(group.ready) for group in saved.pending.groups]
        with_name("batcher", lambda: self.batcher.load_state(saved.state.batcher, ready))
        batches = [
            SampleBatch(batch.step, tuple(_load_samples(group) for group in batch.groups))
            for batch in saved.pending.batches
        ]
        for batch in batches:
            self._untrained[batch.step] = batch
            for group_id in batch.group_ids:
                self.slots.restore(group_id, step=batch.step)
        self._write_resumed(saved.state)
        return batches

    def _write_resumed(self, state: OrchestratorState) -> None:
        self.journal.write(
            JournalEvent.RUN_RESUMED,
            step=state.step,
            lines=state.journal_lines,
            reopened=[_group_id(group.number) for group in state.open_groups],
            cut_off=state.cut_off,
        )

    def _to_play_again(self) -> list[Draw]:
        """Groups that are being played or scored, and tasks that no group is open for yet."""
        playing = [
            Draw(int(group.id[1:]), group.pointer)
            for group in self.groups.values()
            if self.slots.phase(group.id) in (GroupPhase.OPEN, GroupPhase.SCORING)
            and group.id not in self.slots.abandoned()
        ]
        return sorted([*playing, *self.queue.waiting], key=lambda draw: draw.number)


def _group_id(number: int) -> str:
    return f"g{number:06d}"


def _draws(groups: list[OpenGroup]) -> list[Draw]:
    return [Draw(group.number, TaskPointer(**group.task)) for group in groups]


def _save_samples(group: ReadyGroup) -> SavedSamples:
    return SavedSamples(group.id, list(group.samples), group.is_frozen)


def _load_samples(saved: SavedSamples) -> ReadyGroup:
    for sample in saved.samples:
        sample.check()
    return ReadyGroup(saved.group_id, tuple(saved.samples), saved.is_frozen)


def _save_group(group: Group, ready: ReadyGroup) -> SavedGroup:
    return SavedGroup(
        ready=_save_samples(ready),
        task=asdict(group.pointer),
        task_data=group.task.task_data,
        key=group.task.key,
        dropped=group.dropped,
        verdicts=group.verdicts,
        numbers=group.numbers,
        played=[save_played(played) for played in group.played],
    )


def _load_group(saved: SavedGroup) -> Group:
    return Group(
        id=saved.ready.group_id,
        pointer=TaskPointer(**saved.task),
        task=Task(saved.task_data, saved.key),
        played=[load_played(played) for played in saved.played],
        samples=list(saved.ready.samples),
        dropped=saved.dropped,
        verdicts=saved.verdicts,
        numbers=saved.numbers,
    )

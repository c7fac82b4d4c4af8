"""Takes snapshots of the orchestrator at one moment, and restores them."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from gradus.orchestrator.groups.batcher import Batcher, SampleBatch
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.play.tasks import Draw, TaskQueue
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.recording import PlayedState, load_played, save_played
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.resume.checkpoint import (
    FORMAT,
    CheckpointWriter,
    OrchestratorState,
    SavedGroup,
    SavedOrchestrator,
    SavedPieces,
    Snapshot,
    Stateful,
    StatefulPlugin,
    load_pieces,
    load_plugins,
    take_pieces,
    take_plugins,
)
from gradus.orchestrator.types import Group, GroupPhase
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
    plugins: Mapping[str, StatefulPlugin]
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
    _episodes: dict[str, list[PlayedState]] = field(default_factory=dict)
    """Of groups that wait for their batch: nothing changes their episodes any more."""

    def cut(self, batch: SampleBatch) -> None:
        self._untrained[batch.step] = batch

    def trained(self, step: int, *, is_saved: bool) -> None:
        """The trainer finished `step`; it saves the version that the step made if `is_saved`."""
        self._untrained.pop(step, None)
        if is_saved:
            self.checkpoints.take(step + 1, self.snapshot(step + 1))

    def keep(self, group_id: str) -> None:
        """Encode the episodes of a group that was scored: at the cut all at once would hold up the
        event loop."""
        if (group := self.groups.get(group_id)) is not None and group_id not in self._episodes:
            self._episodes[group_id] = [save_played(played) for played in group.played]

    def commit(self, version: int, *, is_last: bool) -> Coroutine[Any, Any, None]:
        """Make a checkpoint of the snapshot of `version`, now that the trainer's part is staged."""
        return self.checkpoints.commit(version, is_last=is_last)

    def snapshot(self, step: int) -> Snapshot:
        """Everything at this moment, which must be the one when `step` steps are trained."""
        state = OrchestratorState(
            format=FORMAT,
            step=step,
            max_steps=self.max_steps,
            journal_lines=self.journal.num_lines,
            num_drawn=self.queue.num_drawn,
            open_groups=self._to_play_again(),
            cut_off=self.slots.abandoned(),
            plugins=take_plugins(self.plugins),
        )
        ready = self.batcher.ready
        for waiting in ready:
            self.keep(waiting.id)
        self._episodes = {waiting.id: self._episodes[waiting.id] for waiting in ready}
        pieces = SavedPieces(
            states=take_pieces(self.pieces),
            batches=[self._untrained[s] for s in sorted(self._untrained)],
            groups=[
                SavedGroup(
                    waiting,
                    replace(self.groups[waiting.id], samples=[], played=[]),
                    self._episodes[waiting.id],
                )
                for waiting in ready
            ],
        )
        sizes = self.records.mark(partial(note_sizes, self.run_dir, step))
        return Snapshot(step, msgspec.json.encode(state), encode(pieces), sizes)

    def restore(self, saved: SavedOrchestrator, num_served: int | None = None) -> list[SampleBatch]:
        """Continue from `saved`; the batches that the trainer needs again.

        `num_served` is the version that inference serves: by default, that of the checkpoint.
        """
        served = saved.state.step if num_served is None else num_served
        load_pieces(self.pieces, saved.pieces.states)
        load_plugins(self.plugins, saved.state.plugins)
        self.queue.restore(saved.state.open_groups, num_drawn=saved.state.num_drawn)
        for kept in saved.pieces.groups:
            group = with_name(f"group {kept.ready.id}", partial(_restored, kept))
            self.groups[group.id] = group
            self.slots.restore(group.id)
        self.batcher.restore([kept.ready for kept in saved.pieces.groups])
        for batch in saved.pieces.batches:
            for sample in batch.samples:
                sample.check()
            self._untrained[batch.step] = batch
            # Inference serves what came of it already, though the step is not told of.
            if batch.step >= served:
                for group_id in batch.group_ids:
                    self.slots.restore(group_id, step=batch.step)
        self.checkpoints.restore(saved.waiting)
        self._write_resumed(saved.state)
        return saved.pieces.batches

    def _write_resumed(self, state: OrchestratorState) -> None:
        self.journal.write(
            JournalEvent.RUN_RESUMED,
            step=state.step,
            lines=state.journal_lines,
            reopened=[f"g{group.number:06d}" for group in state.open_groups],
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


def _restored(kept: SavedGroup) -> Group:
    for sample in kept.ready.samples:
        sample.check()
    played = [load_played(it) for it in kept.played]
    return replace(kept.group, samples=list(kept.ready.samples), played=played)

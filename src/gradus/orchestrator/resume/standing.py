"""Where the orchestrator stands, on disk: one that is started again in its term continues there.

It is taken before a batch is cut and when a step is finished. A batch is sent only once the groups
that it is cut from are on disk, so one that the trainer may have seen is cut again from the same
groups. Events of the trainer stay in the spool until what they changed is on disk; then those that
came later come again. Inference, trainer and environments stay; groups that were being played are
played again under their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gradus.config import RunProcessConfig
from gradus.errors import ProtocolError, StorageError
from gradus.files import write_atomically
from gradus.log import get_logger
from gradus.orchestrator.resume.checkpoint import (
    SavedOrchestrator,
    Snapshot,
    WaitingSnapshot,
    decode_saved,
)
from gradus.orchestrator.resume.snapshot import Snapshotter
from gradus.run.growing_files import cut_episodes
from gradus.run.paths import RunDirectory
from gradus.run.records import Record, read_records
from gradus.wire.codec import decode, encode

log = get_logger(__name__)


class TrainerProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer had told, as it was handled."""

    first_step: int
    num_finished: int
    num_served: int
    last_event: int | None = None
    """Its number in the spool; None before anything was told in this term."""


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a term."""

    progress: TrainerProgress
    state: bytes
    """As `state.json` of a checkpoint."""
    pieces: bytes
    """As its `pieces.msgpack`."""
    sizes: dict[str, int]
    """As its `sizes.json`."""
    waiting: list[WaitingSnapshot]
    """For the trainer's part of checkpoints that are being saved."""

    @property
    def saved(self) -> SavedOrchestrator:
        return decode_saved(self.state, self.pieces, self.waiting)


def progress_of(before: SavedOrchestrator | Standing | None) -> TrainerProgress:
    """Of a checkpoint the trainer has told nothing in this term."""
    if isinstance(before, Standing):
        return before.progress
    step = before.state.step if before else 0
    return TrainerProgress(step, step, step)


@dataclass
class StandingWriter:
    """Owns the file; what was taken first is written first."""

    snapshotter: Snapshotter
    progress: Callable[[], TrainerProgress]
    forget_events: Callable[[int], Awaitable[None]]
    path: Path
    is_on: bool
    """Not so where all processes start again when this one fails."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def keep(self, group_id: str) -> None:
        """Do now what `take` would have to do for a group that was scored."""
        if self.is_on:
            self.snapshotter.keep(group_id)

    def take(self) -> Coroutine[Any, Any, None]:
        """Take it at this moment; what is returned puts it on disk."""
        if not self.is_on:
            return _nothing()
        progress, waiting = self.progress(), self.snapshotter.checkpoints.waiting
        return self._write(progress, self.snapshotter.snapshot(progress.num_finished), waiting)

    async def _write(
        self, progress: TrainerProgress, snapshot: Snapshot, waiting: list[Snapshot]
    ) -> None:
        async with self._writing:
            sizes = await snapshot.sizes
            saved = [
                WaitingSnapshot(it.step, it.state, it.pieces, await it.sizes) for it in waiting
            ]
            standing = Standing(progress, snapshot.state, snapshot.pieces, sizes, saved)
            content = encode(standing)
            try:
                self.snapshotter.journal.flush()
                await asyncio.to_thread(partial(write_atomically, self.path, content, mode=0o600))
            except (OSError, StorageError) as error:
                # A kill costs more then, up to what the checkpoint has.
                log.warning("%s is not written: %s", self.path, error)
                await asyncio.to_thread(self.path.unlink, missing_ok=True)
                return
            assert progress.last_event is not None
            await self.forget_events(progress.last_event)


async def _nothing() -> None:
    pass


@dataclass(frozen=True)
class RecordsBefore:
    """What processes before this one recorded."""

    records: list[Record]
    """What the state of this one follows."""
    later: frozenset[tuple[int, bool]]
    """Step, and whether it is of an evaluation, of those that are made again: they stay."""


def find_recorded(config: RunProcessConfig, standing: Standing | None) -> RecordsBefore:
    path = RunDirectory(Path(config.run_dir)).metrics
    if standing is None:
        return RecordsBefore(list(read_records(path)), frozenset())
    records = list(read_records(path, stop=standing.sizes.get(path.name, 0)))
    later = list(read_records(path))[len(records) :]
    return RecordsBefore(records, frozenset((it.step, it.is_evaluation) for it in later))


def find_standing(config: RunProcessConfig) -> Standing | None:
    """Where an earlier process of this term stood; None for the first. Records that were written
    later are cut off, but for those of steps, which others have read.

    ProtocolError for a file that cannot be read: a checkpoint is left to start from.
    """
    run_dir = RunDirectory(Path(config.run_dir))
    path = run_dir.standing_file(config.term)
    try:
        standing: Standing = decode(path.read_bytes(), Standing)
    except FileNotFoundError:
        return None
    except (OSError, ProtocolError) as error:
        path.unlink(missing_ok=True)
        raise ProtocolError(f"{path} cannot be read: {error}") from error
    cut_episodes(run_dir, standing.progress.num_finished, standing.sizes)
    return standing

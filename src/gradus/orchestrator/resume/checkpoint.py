"""Everything a restart of the orchestrator would lose, saved at the step that the trainer saves.

Checkpoint v holds the weights after v updates. The orchestrator's part is a snapshot taken when
`StepFinished(v - 1)` is handled, in one piece of code without an await: what it had decided by then
belongs to the checkpoint, what came later happens again after a resume. Batches that were cut and
not trained by version v are part of it, as samples. The snapshot waits in memory for
`CheckpointStaged(v)`; then both parts are committed by one rename.

    state.json       counters, task order, curricula, algorithms, unfinished metrics, open groups,
                     in-flight limit
    pending.msgpack  samples of cut and of waiting groups, and the episodes of the latter
    sizes.json       bytes of the files that only grow, see `gradus/run/growing_files.py`

No piece has a default: one that is missing or unknown is a CorruptStateError that names it. There
is no random state: every random choice is seeded by the run's seed and a name or number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from gradus.config import CheckpointConfig, RunProcessConfig
from gradus.errors import CorruptStateError, ProtocolError, StorageError
from gradus.files import DurableFiles
from gradus.gate import plugin_name
from gradus.log import get_logger
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.recording import PlayedState
from gradus.orchestrator.types import Verdict
from gradus.plugins import take_state, with_name
from gradus.run.checkpoints import Checkpoint, CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.wire.codec import decode
from gradus.wire.sample import Sample

PART = "orchestrator"
"""Name of this role's part of a checkpoint."""

TRAINER_PART = "trainer"
FORMAT = 7

T = TypeVar("T")
log = get_logger(__name__)


class Stateful(Protocol):
    """A piece of the orchestrator that a restart would lose."""

    def state(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        ...


class OpenGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group whose episodes a resume plays again from the start."""

    number: int
    task: dict[str, Any]
    """The fields of its TaskPointer."""


class OrchestratorState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`state.json`."""

    format: int
    step: int
    """Updates that the weights of this checkpoint contain."""
    max_steps: int
    journal_lines: int
    """Lines that the journal had."""
    num_drawn: int
    """Groups that got a number."""
    open_groups: list[OpenGroup]
    cut_off: list[str]
    """Abandoned groups of which something still ran."""
    batcher: dict[str, Any]
    pieces: dict[str, dict[str, Any]]
    """State of every Stateful, by name."""


class SavedSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The samples of one group."""

    group_id: str
    samples: list[Sample]
    is_frozen: bool


class SavedBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch that was cut and is not in the weights."""

    step: int
    groups: list[SavedSamples]


class SavedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group that is complete and waits for its batch."""

    ready: SavedSamples
    task: dict[str, Any]
    """The fields of its TaskPointer."""
    task_data: dict[str, Any]
    key: str | int
    dropped: dict[str, str]
    verdicts: dict[str, dict[str, Verdict]]
    numbers: dict[str, float]
    played: list[PlayedState]


class PendingSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pending.msgpack`."""

    batches: list[SavedBatch]
    groups: list[SavedGroup]


@dataclass(frozen=True)
class Snapshot:
    """The orchestrator at one moment, encoded: later changes of its pieces do not reach it."""

    step: int
    state: bytes
    """`state.json`."""
    pending: bytes
    """`pending.msgpack`."""
    sizes: asyncio.Future[dict[str, int]]
    """Known once the records of that moment are on disk."""


@dataclass(frozen=True)
class SavedOrchestrator:
    """What a resumed orchestrator starts from."""

    state: OrchestratorState
    pending: PendingSamples


def load_orchestrator(checkpoint: Checkpoint) -> SavedOrchestrator:
    """The orchestrator's part of a verified checkpoint; CorruptStateError names what is wrong."""
    folder = checkpoint.part(PART)
    state = _read(
        folder / "state.json", lambda raw: msgspec.json.decode(raw, type=OrchestratorState)
    )
    if state.format != FORMAT or state.step != checkpoint.step:
        raise CorruptStateError(
            f"{folder} holds step {state.step} in format {state.format}, expected step "
            f"{checkpoint.step} in format {FORMAT}"
        )
    pending: PendingSamples = _read(
        folder / "pending.msgpack", lambda raw: decode(raw, PendingSamples)
    )
    return SavedOrchestrator(state, pending)


def find_saved(config: RunProcessConfig) -> SavedOrchestrator | None:
    """Our part of the checkpoint that the config names; None for a fresh run."""
    if config.resume_step is None:
        return None
    checkpoints = CheckpointStore(RunDirectory(Path(config.run_dir)), config.term)
    return load_orchestrator(checkpoints.load(config.resume_step))


def load_pieces(pieces: Mapping[str, Stateful], saved: Mapping[str, dict[str, Any]]) -> None:
    """Give each piece its state; refuses a piece without state and state without a piece."""
    if missing := sorted(pieces.keys() - saved.keys()):
        raise CorruptStateError(f"the checkpoint has no state of {', '.join(missing)}")
    if unknown := sorted(saved.keys() - pieces.keys()):
        raise CorruptStateError(
            f"the checkpoint has state of {', '.join(unknown)}, which this run does not have"
        )
    for name, piece in pieces.items():
        with_name(plugin_name(name, piece), partial(piece.load_state, saved[name]))


@dataclass
class CheckpointWriter:
    """Owns the snapshots that wait for the trainer's part, and commits both together.

    >>> writer.take(10, snapshot)  # doctest: +SKIP
    >>> await writer.commit(writer.staged(10))  # doctest: +SKIP
    """

    checkpoints: CheckpointStore
    config: CheckpointConfig
    journal: Journal
    files: DurableFiles = field(default_factory=DurableFiles)
    num_failed: int = 0
    """Commits in a row that a disk refused."""
    _waiting: dict[int, Snapshot] = field(default_factory=dict)
    _committing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, version: int, snapshot: Snapshot) -> None:
        """Keep a snapshot, and the one before it; older ones are of saves that failed."""
        # The trainer ends a save before it begins the next but one, so two may be under way.
        for old in sorted(self._waiting)[:-1]:
            del self._waiting[old]
        self._waiting[version] = snapshot

    def staged(self, version: int) -> Snapshot:
        """The trainer's part of `version` is staged: the snapshot that belongs to it."""
        snapshot = self._waiting.pop(version, None)
        if snapshot is None:
            raise ProtocolError(
                f"the trainer staged checkpoint {version}, for which no snapshot was taken"
            )
        return snapshot

    async def commit(self, snapshot: Snapshot) -> None:
        """Add our part to the trainer's, make both a checkpoint, delete old ones.

        A full disk costs this checkpoint, not the run, until `max_failed_saves` in a row.
        """
        version = snapshot.step
        sizes = await snapshot.sizes
        async with self._committing:
            try:
                await asyncio.to_thread(self.journal.sync)
                await asyncio.to_thread(self._write, version, snapshot, sizes)
            except StorageError as error:
                self._note_failure(version, error)
                return
            self.num_failed = 0
            self.journal.write(JournalEvent.CHECKPOINT_COMMITTED, step=version)

    def _write(self, version: int, snapshot: Snapshot, sizes: Mapping[str, int]) -> None:
        folder = self.checkpoints.staging(version) / PART
        self.files.make_folder(folder)
        self.files.write(folder / "state.json", snapshot.state)
        self.files.write(folder / "pending.msgpack", snapshot.pending)
        self.files.write(folder / "sizes.json", msgspec.json.encode(sizes))
        self.checkpoints.commit(version, [TRAINER_PART, PART])
        self.checkpoints.prune(self.config.keep_last, self.config.keep_interval_steps)

    def _note_failure(self, version: int, error: StorageError) -> None:
        self.num_failed += 1
        if self.num_failed >= self.config.max_failed_saves:
            raise error
        log.error("checkpoint %d is not kept, training continues: %s", version, error)
        self.checkpoints.discard(version)


def build_writer(config: RunProcessConfig, journal: Journal) -> CheckpointWriter:
    """The writer of a run."""
    return CheckpointWriter(
        CheckpointStore(RunDirectory(Path(config.run_dir)), config.term),
        config.checkpoint,
        journal=journal,
    )


def take_states(pieces: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """A copy of the state of every piece; ConfigError names a piece whose state is not JSON."""
    return {name: take_state(plugin_name(name, piece), piece) for name, piece in pieces.items()}


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error.strerror}") from error
    except (ProtocolError, ValueError) as error:
        raise CorruptStateError(f"{path}: {error}") from error

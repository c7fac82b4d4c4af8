"""Everything a restart of the orchestrator would lose, saved at the step that the trainer saves.

Checkpoint v holds the weights after v updates. The orchestrator's part is a snapshot taken when
`StepFinished(v - 1)` is handled, in one piece of code without an await: what it had decided by then
belongs to the checkpoint, what came later happens again after a resume. Batches that were cut and
not trained by version v are part of it, as samples. The snapshot waits in memory for
`CheckpointStaged(v)`; then both parts are committed by one rename.

    state.json       where the run stands, open groups, and the states of algorithms and curricula
    pieces.msgpack   the state of every other piece, samples of cut and of waiting groups, and the
                     episodes of the latter
    sizes.json       bytes of the files that only grow, see `gradus/run/growing_files.py`

A piece keeps what a restart would lose in its attribute `state`, which is encoded as it is; what
follows from the records of the steps, as alarms do, is made from them again. No piece has a
default: one that is missing or unknown is a CorruptStateError that names it. There is no random
state: every random choice is seeded by the run's seed and a name or number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
from gradus.orchestrator.groups.batcher import ReadyGroup, SampleBatch
from gradus.orchestrator.play.tasks import Draw
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.recording import PlayedState
from gradus.orchestrator.types import Group
from gradus.plugins import take_state, with_name
from gradus.run.checkpoints import Checkpoint, CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.wire.codec import decode, encode

PART = "orchestrator"
"""Name of this role's part of a checkpoint."""

TRAINER_PART = "trainer"
FORMAT = 9
LAST_SAVE_SECONDS = 600.0
"""How long the last checkpoint waits for a disk that does not take it."""
LAST_SAVE_PAUSE_SECONDS = 5.0

T = TypeVar("T")
log = get_logger(__name__)


class Stateful(Protocol):
    """A piece of the orchestrator that a restart would lose."""

    state: Any
    """Everything of it, of a type that `wire/codec.py` takes."""


class StatefulPlugin(Protocol):
    """A piece whose code may be the user's."""

    def state(self) -> dict[str, Any]:
        """Everything, as JSON values."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""


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
    open_groups: list[Draw]
    """Groups whose episodes a resume plays again from the start."""
    cut_off: list[str]
    """Abandoned groups of which something still ran."""
    plugins: dict[str, dict[str, Any]]
    """State of every algorithm and curriculum, by name."""


class SavedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group that is complete and waits for its batch."""

    ready: ReadyGroup
    group: Group
    """Without its episodes and samples."""
    played: list[PlayedState]


class SavedPieces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pieces.msgpack`."""

    states: dict[str, bytes]
    """State of every `Stateful`, by name."""
    batches: list[SampleBatch]
    """Cut, and not in the weights."""
    groups: list[SavedGroup]


@dataclass(frozen=True)
class Snapshot:
    """The orchestrator at one moment, encoded: later changes of its pieces do not reach it."""

    step: int
    state: bytes
    """`state.json`."""
    pieces: bytes
    """`pieces.msgpack`."""
    sizes: asyncio.Future[dict[str, int]]
    """Known once the records of that moment are on disk."""


class WaitingSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One whose sizes are known, for a process that takes the place of this one."""

    step: int
    state: bytes
    pieces: bytes
    sizes: dict[str, int]


@dataclass(frozen=True)
class SavedOrchestrator:
    """What a resumed orchestrator starts from."""

    state: OrchestratorState
    pieces: SavedPieces
    waiting: Sequence[WaitingSnapshot] = ()
    """Of a process in the same term, for checkpoints that are being saved."""


def load_orchestrator(checkpoint: Checkpoint) -> SavedOrchestrator:
    """The orchestrator's part of a verified checkpoint; CorruptStateError names what is wrong."""
    folder = checkpoint.part(PART)
    state = _read(folder / "state.json", _decode_state)
    if state.format != FORMAT or state.step != checkpoint.step:
        raise CorruptStateError(
            f"{folder} holds step {state.step} in format {state.format}, expected step "
            f"{checkpoint.step} in format {FORMAT}"
        )
    pieces: SavedPieces = _read(folder / "pieces.msgpack", lambda raw: decode(raw, SavedPieces))
    return SavedOrchestrator(state, pieces)


def decode_saved(
    state: bytes, pieces: bytes, waiting: Sequence[WaitingSnapshot]
) -> SavedOrchestrator:
    """What a snapshot of this version of gradus holds."""
    return SavedOrchestrator(_decode_state(state), decode(pieces, SavedPieces), waiting)


def _decode_state(raw: bytes) -> OrchestratorState:
    return msgspec.json.decode(raw, type=OrchestratorState)


def find_saved(config: RunProcessConfig) -> SavedOrchestrator | None:
    """Our part of the checkpoint that the config names; None for a fresh run."""
    if config.resume_step is None:
        return None
    checkpoints = CheckpointStore(RunDirectory(Path(config.run_dir)), config.term)
    return load_orchestrator(checkpoints.load(config.resume_step))


def load_pieces(pieces: Mapping[str, Stateful], saved: Mapping[str, bytes]) -> None:
    """Give each piece its state; refuses a piece without state and state without a piece."""
    _check_names(pieces, saved)
    for name, piece in pieces.items():
        try:
            piece.state = decode(saved[name], type(piece.state))
        except ProtocolError as error:
            raise CorruptStateError(f"state of {name} in the checkpoint: {error}") from error


def load_plugins(
    plugins: Mapping[str, StatefulPlugin], saved: Mapping[str, dict[str, Any]]
) -> None:
    """The same for algorithms and curricula."""
    _check_names(plugins, saved)
    for name, plugin in plugins.items():
        with_name(plugin_name(name, plugin), partial(plugin.load_state, saved[name]))


def _check_names(wanted: Mapping[str, object], saved: Mapping[str, object]) -> None:
    if missing := sorted(wanted.keys() - saved.keys()):
        raise CorruptStateError(f"the checkpoint has no state of {', '.join(missing)}")
    if unknown := sorted(saved.keys() - wanted.keys()):
        raise CorruptStateError(
            f"the checkpoint has state of {', '.join(unknown)}, which this run does not have"
        )


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
    forget: Callable[[int], Awaitable[None]] | None = None
    """Told the step before which no batch is trained again by a trainer that starts again alone:
    from one checkpoint before the newest on, which may be damaged, or too new for whoever looked
    while it was committed."""
    _waiting: dict[int, Snapshot] = field(default_factory=dict)
    _committing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, version: int, snapshot: Snapshot) -> None:
        """Keep a snapshot, and the one before it; older ones are of saves that failed."""
        # The trainer ends a save before it begins the next but one, so two may be under way.
        for old in sorted(self._waiting)[:-1]:
            del self._waiting[old]
        self._waiting[version] = snapshot

    @property
    def waiting(self) -> list[Snapshot]:
        """What `restore` takes, oldest first."""
        return [self._waiting[version] for version in sorted(self._waiting)]

    def restore(self, waiting: Iterable[WaitingSnapshot]) -> None:
        """Continue with the snapshots of a process before this one in its term."""
        for it in waiting:
            sizes = asyncio.get_running_loop().create_future()
            sizes.set_result(it.sizes)
            self._waiting[it.step] = Snapshot(it.step, it.state, it.pieces, sizes)

    async def commit(self, version: int, *, is_last: bool = False) -> None:
        """The trainer's part of `version` is staged: add ours, make both a checkpoint, delete old
        ones.

        A disk that does not take it costs this checkpoint, not the run: the next one is due soon.
        Only for the last one a full disk is waited for, LAST_SAVE_SECONDS at most. A trainer that
        died and trains the same steps again costs those for which no snapshot waits, or of which
        its part is gone.
        """
        snapshot = self._waiting.pop(version, None)
        if snapshot is None:
            log.warning(
                "checkpoint %d is not kept: no state of this process waits for it, as when a "
                "trainer trains its step again",
                version,
            )
            self.checkpoints.discard(version)
            return
        sizes = await snapshot.sizes
        async with self._committing:
            try:
                await self._keep(version, snapshot, sizes, LAST_SAVE_SECONDS if is_last else 0.0)
            except (ProtocolError, FileNotFoundError, CorruptStateError) as error:
                log.warning("checkpoint %d is not kept, its trainer is gone: %s", version, error)
                self.checkpoints.discard(version)
                return
            except StorageError as error:
                if is_last:
                    raise
                log.error("checkpoint %d is not kept, training goes on: %s", version, error)
                self.checkpoints.discard(version)
                return
            self.journal.write(JournalEvent.CHECKPOINT_COMMITTED, step=version)
            kept = self.checkpoints.folders()[-2:]
            if self.forget is not None and len(kept) == 2:
                await self.forget(kept[0][0])

    async def _keep(
        self, version: int, snapshot: Snapshot, sizes: Mapping[str, int], seconds: float
    ) -> None:
        """Commit; StorageError when the disk has not taken it after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            try:
                await asyncio.to_thread(self.journal.sync)
                await asyncio.to_thread(self._write, version, snapshot, sizes)
                return
            except StorageError as error:
                if time.monotonic() >= until:
                    raise
                log.error("checkpoint %d, the last, waits for the disk: %s", version, error)
            await asyncio.sleep(LAST_SAVE_PAUSE_SECONDS)

    def _write(self, version: int, snapshot: Snapshot, sizes: Mapping[str, int]) -> None:
        folder = self.checkpoints.staging(version) / PART
        self.files.delete(folder)  # what an earlier try left
        self.files.make_folder(folder)
        self.files.write(folder / "state.json", snapshot.state)
        self.files.write(folder / "pieces.msgpack", snapshot.pieces)
        self.files.write(folder / "sizes.json", msgspec.json.encode(sizes))
        self.checkpoints.commit(version, [TRAINER_PART, PART])
        self.checkpoints.prune(self.config.keep_last, self.config.keep_interval_steps)


def build_writer(
    config: RunProcessConfig, journal: Journal, forget: Callable[[int], Awaitable[None]]
) -> CheckpointWriter:
    """The writer of a run."""
    return CheckpointWriter(
        CheckpointStore(RunDirectory(Path(config.run_dir)), config.term),
        config.checkpoint,
        journal=journal,
        forget=forget if config.is_trainer_replaceable else None,
    )


def take_pieces(pieces: Mapping[str, Stateful]) -> dict[str, bytes]:
    """The encoded state of every piece."""
    return {name: encode(piece.state) for name, piece in pieces.items()}


def take_plugins(plugins: Mapping[str, StatefulPlugin]) -> dict[str, dict[str, Any]]:
    """A copy of each state; ConfigError names a plug-in whose state is not JSON."""
    return {name: take_state(plugin_name(name, plugin), plugin) for name, plugin in plugins.items()}


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error.strerror}") from error
    except (ProtocolError, ValueError) as error:
        raise CorruptStateError(f"{path}: {error}") from error

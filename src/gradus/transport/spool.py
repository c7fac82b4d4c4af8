"""A spool on disk carries batches and events; what was sent survives both processes.

Layout below `run_dir.spool`:

    batch_00000003/rank_0.msgpack   one rank's part
    batch_00000003/manifest.json    term, size and SHA-256 of each part; appears whole
    batch_00000003/received         empty; the trainer acknowledged the batch
    events/0000000007.msgpack       the trainer's eighth event
    events/0000000006.done          the orchestrator asked for more after this one

A reader is woken by `watch.py` and looks with `listdir`, which a network file system answers
freshly.
An orchestrator that starts again in the same term gets the last event that it may not have
handled once more; everything before it stays handled.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections import deque
from pathlib import Path

import msgspec

from gradus.errors import CorruptStateError, DeadlineError, FencedError, ProtocolError
from gradus.files import FULL_DISK_ERRORS, storage_error
from gradus.log import get_logger
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.transport.watch import FolderWatch
from gradus.wire.codec import decode, decode_event, decode_rank_batch, encode, split_by_rank
from gradus.wire.events import BatchReceived, Event, StepFinished
from gradus.wire.micro_batch import Batch, RankBatch

_LOG = get_logger(__name__)

FULL_DISK_SECONDS = 600.0
"""How long a batch waits for room on a full disk."""

FULL_DISK_PAUSE_SECONDS = 5.0
"""Between two tries."""

_MANIFEST = "manifest.json"
_RECEIVED = "received"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    bytes: int


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    term: int
    parts: list[_Part]


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sequence: int
    sha256: str
    event: bytes


class SendLedger:
    """Counts the batches between send and acknowledgement; refuses what breaks the numbering.

    >>> ledger = SendLedger(term=1, capacity=1)
    >>> ledger.note_sent(0, "digest")
    >>> ledger.has_room
    False
    """

    def __init__(self, *, term: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity} lets no batch through; use at least 1")
        self.term = term
        self.capacity = capacity
        self.last_finished = -1
        self._last_received = -1
        self._digests: dict[int, str] = {}
        self._unacknowledged: set[int] = set()

    @property
    def has_room(self) -> bool:
        """Whether one more batch may be sent."""
        return len(self._unacknowledged) < self.capacity

    def is_resend(self, batch: Batch, digest: str) -> bool:
        """True when `batch` was sent before; refuses another term and another content."""
        if batch.term != self.term:
            raise ProtocolError(
                f"batch {batch.step} carries term {batch.term}, its sender has {self.term}"
            )
        known = self._digests.get(batch.step)
        if known is not None and known != digest:
            raise ProtocolError(
                f"batch {batch.step} was already sent with other content; a step has one batch"
            )
        return known is not None or batch.step <= self.last_finished

    def note_sent(self, step: int, digest: str, *, acknowledged: bool = False) -> None:
        """Batch `step` lies durable in the transport.

        The trainer may have acknowledged it before: it reads a batch as soon as it has its name.
        """
        self._digests[step] = digest
        if not acknowledged and step > self._last_received:
            self._unacknowledged.add(step)

    def note_event(self, event: Event) -> None:
        """Learn from an event of the trainer; FencedError when a newer term sent it."""
        if event.term > self.term:
            raise FencedError(
                f"the trainer answers to term {event.term}, this orchestrator has term "
                f"{self.term} and must stop"
            )
        if event.term < self.term:
            return  # Of a dead launch, whose steps this one does again.
        if isinstance(event, BatchReceived):
            self._last_received = max(self._last_received, event.step)
            self._unacknowledged.discard(event.step)
        if isinstance(event, StepFinished):
            self.last_finished = max(self.last_finished, event.step)
            # Trained batches are never sent again, so their digests may be forgotten.
            for step in [s for s in self._digests if s < event.step]:
                del self._digests[step]
                self._unacknowledged.discard(step)


def name_of_batch(step: int) -> str:
    """Folder of batch `step`; sorts by step."""
    return f"batch_{step:08d}"


class SpoolSender:
    """The orchestrator's end; `send` waits while `capacity` batches are unacknowledged.

    >>> sender = SpoolSender(run_dir, term=1)  # doctest: +SKIP
    >>> await sender.send(batch)  # doctest: +SKIP
    """

    def __init__(self, run_dir: RunDirectory, term: int, *, capacity: int = 2) -> None:
        """Takes over what an earlier life of the same term left; FencedError for a newer one's."""
        self._run_dir = run_dir
        self._ledger = SendLedger(term=term, capacity=capacity)
        self._events = run_dir.spool / "events"
        self._events.mkdir(parents=True, exist_ok=True)
        self._arrived: deque[tuple[int, Event]] = deque()
        self._next_sequence = _last_sequence(self._events, ".done") + 1
        self._delivered = self._next_sequence - 1
        self._sending = asyncio.Lock()
        self._watch = FolderWatch(self._events)
        self._adopt_spool()

    async def send(self, batch: Batch) -> None:
        # On a thread: a large batch takes half a second.
        manifest, parts = await asyncio.to_thread(_encode_parts, batch)
        digest = _sha256(msgspec.json.encode(manifest))
        async with self._sending:
            if self._ledger.is_resend(batch, digest):
                return
            while not self._ledger.has_room:
                await self._watch.wait_async()
                self._look_for_events()
            check_term(self._run_dir, self._ledger.term)
            await self._write_when_there_is_room(manifest, parts)
            self._ledger.note_sent(batch.step, digest)

    async def _write_when_there_is_room(self, manifest: _Manifest, parts: list[bytes]) -> None:
        """A full disk holds the run until somebody makes room; StorageError after the deadline."""
        deadline = time.monotonic() + FULL_DISK_SECONDS
        while True:
            try:
                await asyncio.to_thread(self._write, manifest, parts)
                return
            except OSError as error:
                needed = sum(map(len, parts))
                told = storage_error(error, self._run_dir.spool, needed_bytes=needed)
                if error.errno not in FULL_DISK_ERRORS or time.monotonic() >= deadline:
                    raise told from error
            _LOG.warning("batch %d waits for room: %s", manifest.step, told)
            await asyncio.sleep(FULL_DISK_PAUSE_SECONDS)

    async def receive_event(self) -> Event:
        self._mark_done(self._delivered)
        while True:
            self._look_for_events()
            if self._arrived:
                self._delivered, event = self._arrived.popleft()
                return event
            await self._watch.wait_async()

    async def close(self) -> None:
        self._watch.close()

    def _adopt_spool(self) -> None:
        """Take over the batches of this term that lie in the spool; drop those of older ones."""
        for torn in self._run_dir.spool.glob(".batch_*"):
            shutil.rmtree(torn)
        for folder in sorted(self._run_dir.spool.glob("batch_*")):
            manifest = _read_manifest(folder)
            if manifest.term > self._ledger.term:
                raise FencedError(
                    f"{folder} was written under term {manifest.term}; this process has term "
                    f"{self._ledger.term} and must stop"
                )
            if manifest.term < self._ledger.term:
                _remove_batch(folder)
                continue
            digest = _sha256(msgspec.json.encode(manifest))
            is_acknowledged = (folder / _RECEIVED).exists()
            self._ledger.note_sent(manifest.step, digest, acknowledged=is_acknowledged)

    def _write(self, manifest: _Manifest, parts: list[bytes]) -> None:
        spool = self._run_dir.spool
        folder = spool / name_of_batch(manifest.step)
        temporary = spool / f".{folder.name}.tmp-{manifest.term}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            for rank, part in enumerate(parts):
                _write_durably(temporary / f"rank_{rank}.msgpack", part)
            _write_durably(temporary / _MANIFEST, msgspec.json.encode(manifest))
            _sync_directory(temporary)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        temporary.rename(folder)
        _sync_directory(spool)

    def _look_for_events(self) -> None:
        names = set(os.listdir(self._events))
        while (name := f"{self._next_sequence:010d}.msgpack") in names:
            event = _read_event(self._events / name, self._next_sequence)
            self._ledger.note_event(event)
            if event.term == self._ledger.term:
                self._arrived.append((self._next_sequence, event))
                self._settle(event)
            self._next_sequence += 1

    def _settle(self, event: Event) -> None:
        """Remember an acknowledgement on disk; delete batches that are trained."""
        spool = self._run_dir.spool
        if isinstance(event, BatchReceived):
            folder = spool / name_of_batch(event.step)
            if folder.exists():
                (folder / _RECEIVED).touch()
        if isinstance(event, StepFinished):
            for folder in spool.glob("batch_*"):
                if folder.name < name_of_batch(event.step):
                    _remove_batch(folder)

    def _mark_done(self, sequence: int) -> None:
        """The caller came back for more, so it handled event `sequence`; keep only this mark.

        The new mark comes first: without any, a sender that starts again would wait for event 0.
        """
        if sequence < 0:
            return
        event = self._events / f"{sequence:010d}.msgpack"
        if event.exists():
            event.rename(event.with_suffix(".done"))
        for name in os.listdir(self._events):
            number = name.partition(".")[0]
            if number.isdigit() and int(number) < sequence:
                (self._events / name).unlink()


class SpoolReceiver:
    """The end of data-parallel rank `rank`.

    >>> SpoolReceiver(run_dir, term=1, rank=0).receive(0, timeout_seconds=60)  # doctest: +SKIP
    """

    def __init__(self, run_dir: RunDirectory, term: int, rank: int) -> None:
        self._run_dir = run_dir
        self._term = term
        self._rank = rank
        self._events = run_dir.spool / "events"
        self._events.mkdir(parents=True, exist_ok=True)
        self._next_sequence = _last_sequence(self._events) + 1
        self._watch = FolderWatch(run_dir.spool)

    def receive(self, step: int, *, timeout_seconds: float) -> RankBatch:
        name = name_of_batch(step)
        deadline = time.monotonic() + timeout_seconds
        while name not in os.listdir(self._run_dir.spool):
            if time.monotonic() >= deadline:
                check_term(self._run_dir, self._term)
                raise DeadlineError(
                    f"batch {step} did not come from the orchestrator in {timeout_seconds:g} s; "
                    f"see its log in {self._run_dir.logs}"
                )
            self._watch.wait(deadline - time.monotonic())
        return self._read(self._run_dir.spool / name, step)

    def send_event(self, event: Event) -> None:
        if event.term != self._term:
            raise ProtocolError(
                f"event {type(event).__name__} carries term {event.term}, "
                f"its sender has {self._term}"
            )
        check_term(self._run_dir, self._term)
        raw = encode(event)
        envelope = _Envelope(self._next_sequence, _sha256(raw), raw)
        path = self._events / f"{self._next_sequence:010d}.msgpack"
        temporary = path.with_name(f".{path.name}.tmp-{self._term}")
        _write_durably(temporary, encode(envelope))
        temporary.rename(path)
        _sync_directory(self._events)
        self._next_sequence += 1

    def close(self) -> None:
        self._watch.close()

    def _read(self, folder: Path, step: int) -> RankBatch:
        manifest = _read_manifest(folder)
        if manifest.term != self._term:
            raise FencedError(
                f"{folder} was written under term {manifest.term}; this trainer has term "
                f"{self._term} and must stop"
            )
        if self._rank >= len(manifest.parts):
            raise ProtocolError(
                f"batch {step} has parts for {len(manifest.parts)} ranks, this is rank {self._rank}"
            )
        path = folder / f"rank_{self._rank}.msgpack"
        expected = manifest.parts[self._rank]
        raw = _read_file(path, expected.bytes)
        if _describe(raw) != expected:
            raise CorruptStateError(f"{path} does not have the size and digest of its manifest")
        batch = decode_rank_batch(raw)
        if (batch.step, batch.term, batch.rank) != (step, self._term, self._rank):
            raise ProtocolError(
                f"{path} holds step {batch.step}, term {batch.term}, rank {batch.rank}; "
                f"expected {step}, {self._term}, {self._rank}"
            )
        return batch


def _encode_parts(batch: Batch) -> tuple[_Manifest, list[bytes]]:
    """One part per rank, and what the manifest says of them."""
    parts = [encode(part) for part in split_by_rank(batch)]
    return _Manifest(batch.step, batch.term, [_describe(part) for part in parts]), parts


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / _MANIFEST
    try:
        manifest = msgspec.json.decode(_read_file(path), type=_Manifest)
    except ValueError as error:
        raise CorruptStateError(f"{path} is not a manifest: {error}") from error
    if name_of_batch(manifest.step) != folder.name:
        raise ProtocolError(f"{path} says step {manifest.step}, which is not its folder's")
    return manifest


def _remove_batch(folder: Path) -> None:
    """Delete a batch. It loses its name first, so that a kill never leaves half of one."""
    nameless = folder.with_name(f".{folder.name}.trained")
    folder.rename(nameless)
    shutil.rmtree(nameless, ignore_errors=True)


def _read_event(path: Path, sequence: int) -> Event:
    raw = _read_file(path)
    try:
        envelope: _Envelope = decode(raw, _Envelope)
    except ProtocolError as error:
        raise CorruptStateError(f"{path} is not an event: {error}") from error
    if _sha256(envelope.event) != envelope.sha256:
        raise CorruptStateError(f"{path} does not have the digest that it states")
    if envelope.sequence != sequence:
        raise ProtocolError(f"{path} says number {envelope.sequence}, expected {sequence}")
    return decode_event(envelope.event)


def _read_file(path: Path, max_bytes: int = 1 << 20) -> bytes:
    """At most one byte more than `max_bytes`, so that a wrong size shows and memory is bounded."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error.strerror}") from error


def _last_sequence(events: Path, suffix: str = "") -> int:
    numbers = [
        int(name.partition(".")[0])
        for name in os.listdir(events)
        if name[0].isdigit() and name.endswith(suffix)
    ]
    return max(numbers, default=-1)


def _describe(raw: bytes) -> _Part:
    return _Part(sha256=_sha256(raw), bytes=len(raw))


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _write_durably(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A spool on disk carries batches and events; what was sent survives both processes.

Layout below `run_dir.spool`:

    batch_00000003/rank_0.msgpack   one rank's part
    batch_00000003/manifest.json    term, size and SHA-256 of each part; appears whole
    end.msgpack                     from which step on no batch comes, if the run ends early
    events/0000000007.msgpack       the trainer's eighth event
    events/0000000006.done          the orchestrator asked for more after this one

A batch is deleted once it is trained or, where a trainer may be started again from a checkpoint
(`keeps_trained`), once the sender is told that no checkpoint needs it.

Nothing here bounds how many batches lie there: the slots of their groups do. Who waits looks with
`listdir`, which a network file system does not cache, each time after a hundredth of the wait.
An orchestrator that starts again in the same term gets the last event once more, since it may not
have handled it; everything before it stays handled.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from gradus.errors import (
    CorruptStateError,
    DeadlineError,
    FencedError,
    FullDiskError,
    ProtocolError,
)
from gradus.files import DurableFiles, write_atomically
from gradus.log import get_logger, note_step
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.sealed import (
    Entries,
    FileEntry,
    SealedFolder,
    content_entry,
    contents_digest,
    discard,
    discard_unfinished,
    open_sealed,
    seal,
    stage,
)
from gradus.wire.codec import decode, decode_rank_batch, encode
from gradus.wire.events import EndOfBatches, Event, StepFinished
from gradus.wire.micro_batch import Batch, RankBatch

_LOG = get_logger(__name__)

FULL_DISK_SECONDS = 600.0
"""How long a batch waits for room on a full disk."""

FULL_DISK_PAUSE_SECONDS = 5.0
"""Between two tries."""

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.1
"""Between two looks for a batch or an event."""

_MAX_EVENT_BYTES = 1 << 20


class BatchesEnded(Exception):
    """The orchestrator says that this batch never comes: the run ends before its last step."""


class BatchLabel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest of a batch says of it."""

    step: int
    term: int


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sequence: int
    sha256: str
    event: bytes


def name_of_batch(step: int) -> str:
    return f"batch_{step:08d}"


class SpoolSender:
    """The orchestrator's end; `last_handled` is the number of the last event that was handled."""

    def __init__(
        self,
        run_dir: RunDirectory,
        term: int,
        *,
        keeps_trained: bool = False,
        keeps_events: bool = False,
        files: DurableFiles | None = None,
    ) -> None:
        """Takes over what an earlier process of this term left; FencedError for a newer term.

        With `keeps_events` they come again to such a process until `forget_events`.
        """
        self._keeps_trained = keeps_trained
        self._keeps_events = keeps_events
        self._run_dir = run_dir
        self._files = files or DurableFiles()
        self._term = term
        self._digests: dict[int, str] = {}
        self._last_finished = -1
        self._events = run_dir.spool / "events"
        self._events.mkdir(parents=True, exist_ok=True)
        self._arrived: deque[tuple[int, Event]] = deque()
        self._next_sequence = _last_sequence(self._events, ".done") + 1
        self._delivered = self.last_handled = self._next_sequence - 1
        self._sending = asyncio.Lock()
        self._adopt_spool()

    async def send(self, batch: Batch) -> None:
        """Make `batch` durable for the trainer. The same step twice is refused unless the content
        is the same (a resend)."""
        # On a thread: a large batch takes half a second.
        label = BatchLabel(batch.step, batch.term)
        parts, entries = await asyncio.to_thread(_encode_parts, batch)
        digest = contents_digest(label, entries)
        async with self._sending:
            if self._was_sent(batch, digest):
                return
            check_term(self._run_dir, self._term)
            await self._write_when_there_is_room(label, parts, entries)
            self._digests[batch.step] = digest
            note_step(batch.step + 1)

    def _was_sent(self, batch: Batch, digest: str) -> bool:
        """Whether `batch` was sent before; refuses another term and another content."""
        if batch.term != self._term:
            raise ProtocolError(
                f"batch {batch.step} carries term {batch.term}, its sender has {self._term}"
            )
        known = self._digests.get(batch.step)
        if known is not None and known != digest:
            raise ProtocolError(
                f"batch {batch.step} was already sent with other content; a step has one batch"
            )
        return known is not None or batch.step <= self._last_finished

    async def _write_when_there_is_room(
        self, label: BatchLabel, parts: Mapping[str, bytes], entries: Entries
    ) -> None:
        """A full disk holds the run until somebody makes room; StorageError after the deadline."""
        deadline = time.monotonic() + FULL_DISK_SECONDS
        while True:
            try:
                await asyncio.to_thread(self._write, label, parts, entries)
                return
            except FullDiskError as error:
                if time.monotonic() >= deadline:
                    raise
                _LOG.warning("batch %d waits for room: %s", label.step, error)
            await asyncio.sleep(FULL_DISK_PAUSE_SECONDS)

    async def end(self, step: int) -> None:
        """Say that no batch from `step` on will come."""
        check_term(self._run_dir, self._term)
        content = encode(EndOfBatches(step, self._term))
        await asyncio.to_thread(write_atomically, self._run_dir.end_of_batches, content, mode=0o600)

    async def forget(self, step: int) -> None:
        """Delete the batches before `step`: no trainer starts again so far back."""
        await asyncio.to_thread(self._delete_before, step)

    async def forget_events(self, last: int) -> None:
        """An orchestrator that starts again need not hear of the events up to this number."""
        self._mark_done(last)

    async def receive_event(self) -> Event:
        """The trainer's next event, in order, each exactly once per term."""
        self.last_handled = self._delivered
        if not self._keeps_events:
            self._mark_done(self._delivered)
        pauses = _pauses()
        self._look_for_events()
        while not self._arrived:
            await asyncio.sleep(next(pauses))
            self._look_for_events()
        self._delivered, event = self._arrived.popleft()
        return event

    def _adopt_spool(self) -> None:
        """Take over the batches of this term that lie in the spool; drop those of older ones."""
        discard_unfinished(self._run_dir.spool, self._files, last_term=self._term)
        for folder in sorted(self._run_dir.spool.glob("batch_*")):
            sealed = _open_batch(folder)
            step, term = sealed.label.step, sealed.label.term
            if term > self._term:
                raise FencedError(
                    f"{folder} was written under term {term}; this process has term "
                    f"{self._term} and must stop"
                )
            if term < self._term:
                discard(folder, self._term, self._files)
                continue
            self._digests[step] = sealed.digest

    def _write(self, label: BatchLabel, parts: Mapping[str, bytes], entries: Entries) -> None:
        folder = self._run_dir.spool / name_of_batch(label.step)
        with stage(folder, self._files, term=label.term) as staging:
            for name, part in parts.items():
                self._files.stage(staging / name, part)
            seal(staging, folder, label, entries=entries, files=self._files)

    def _look_for_events(self) -> None:
        names = set(os.listdir(self._events))
        while (name := f"{self._next_sequence:010d}.msgpack") in names:
            event = _read_event(self._events / name, self._next_sequence)
            if event.term > self._term:
                raise FencedError(
                    f"the trainer answers to term {event.term}, this orchestrator has term "
                    f"{self._term} and must stop"
                )
            # Those of an older term are of a dead launch, whose steps this one does again.
            if event.term == self._term:
                self._arrived.append((self._next_sequence, event))
                if isinstance(event, StepFinished):
                    self._note_trained(event.step)
            self._next_sequence += 1

    def _note_trained(self, step: int) -> None:
        """Trained batches are never sent again: forget their digests, and delete them."""
        self._last_finished = max(self._last_finished, step)
        self._digests = {it: digest for it, digest in self._digests.items() if it >= step}
        if not self._keeps_trained:
            self._delete_before(step)

    def _delete_before(self, step: int) -> None:
        for folder in self._run_dir.spool.glob("batch_*"):
            if folder.name < name_of_batch(step):
                discard(folder, self._term, self._files)

    def _mark_done(self, sequence: int) -> None:
        """The caller asks for the next event, so it handled `sequence`; keep only this mark.

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
    """The end of data-parallel rank `rank`; blocking, because the trainer is."""

    def __init__(self, run_dir: RunDirectory, term: int, rank: int) -> None:
        self._run_dir = run_dir
        self._term = term
        self._rank = rank
        self._events = run_dir.spool / "events"
        self._events.mkdir(parents=True, exist_ok=True)
        self._next_sequence = _last_sequence(self._events) + 1

    def receive(
        self, step: int, *, timeout_seconds: float, check: Callable[[], None] = lambda: None
    ) -> RankBatch:
        """This rank's part of batch `step`; BatchesEnded when none comes any more, DeadlineError
        after `timeout_seconds`, FencedError when the batch was written under another term. While it
        waits it calls `check` again and again, whose errors end the wait."""
        name, pauses = name_of_batch(step), _pauses()
        deadline = time.monotonic() + timeout_seconds
        while name not in (names := os.listdir(self._run_dir.spool)):
            if self._run_dir.end_of_batches.name in names:
                self._check_end(step)
            if any(other.startswith("batch_") and other > name for other in names):
                self._refuse_deleted(step, name)
            if time.monotonic() >= deadline:
                check_term(self._run_dir, self._term)
                raise DeadlineError(
                    f"batch {step} did not come from the orchestrator in {timeout_seconds:g} s; "
                    f"see its log in {self._run_dir.logs}"
                )
            time.sleep(next(pauses))
            check()
        return self._read(self._run_dir.spool / name, step)

    def send_event(self, event: Event) -> None:
        """Append one event for the orchestrator. Only rank 0 calls this, one thread at a time."""
        if event.term != self._term:
            raise ProtocolError(
                f"event {type(event).__name__} carries term {event.term}, "
                f"its sender has {self._term}"
            )
        check_term(self._run_dir, self._term)
        raw = encode(event)
        envelope = _Envelope(self._next_sequence, _sha256(raw), raw)
        path = self._events / f"{self._next_sequence:010d}.msgpack"
        write_atomically(path, encode(envelope), mode=0o600)
        DurableFiles().sync(self._events)
        self._next_sequence += 1

    def _check_end(self, step: int) -> None:
        end: EndOfBatches = decode(_read_file(self._run_dir.end_of_batches), EndOfBatches)
        if end.term == self._term and end.step <= step:
            raise BatchesEnded

    def _refuse_deleted(self, step: int, name: str) -> None:
        """Batches come in order: one that is missing before another never comes."""
        if name not in os.listdir(self._run_dir.spool):
            raise ProtocolError(
                f"batch {step} is not in {self._run_dir.spool} any more: a checkpoint after it was "
                "committed"
            )

    def _read(self, folder: Path, step: int) -> RankBatch:
        sealed = _open_batch(folder)
        if sealed.label.term != self._term:
            raise FencedError(
                f"{folder} was written under term {sealed.label.term}; this trainer has term "
                f"{self._term} and must stop"
            )
        name = _name_of_part(self._rank)
        if name not in sealed.files:
            raise ProtocolError(
                f"batch {step} has parts for {len(sealed.files)} ranks, this is rank {self._rank}"
            )
        path, raw = folder / name, sealed.read(name)
        batch = decode_rank_batch(raw)
        if (batch.step, batch.term, batch.rank) != (step, self._term, self._rank):
            raise ProtocolError(
                f"{path} holds step {batch.step}, term {batch.term}, rank {batch.rank}; "
                f"expected {step}, {self._term}, {self._rank}"
            )
        return batch


def _pauses() -> Iterator[float]:
    """Seconds until the next look, each about a hundredth of the wait so far."""
    pause = SHORTEST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(1.01 * pause, LONGEST_PAUSE_SECONDS)


def _name_of_part(rank: int) -> str:
    return f"rank_{rank}.msgpack"


def _encode_parts(batch: Batch) -> tuple[dict[str, bytes], dict[str, FileEntry]]:
    parts = {_name_of_part(part.rank): encode(part) for part in batch.by_rank()}
    return parts, {name: content_entry(part) for name, part in parts.items()}


def _open_batch(folder: Path) -> SealedFolder[BatchLabel]:
    sealed = open_sealed(folder, BatchLabel)
    if name_of_batch(sealed.label.step) != folder.name:
        raise ProtocolError(f"{folder} says step {sealed.label.step}, which is not its name's")
    return sealed


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
    return decode(envelope.event, Event)


def _read_file(path: Path) -> bytes:
    """At most _MAX_EVENT_BYTES, so that memory is bounded."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_EVENT_BYTES)
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error.strerror}") from error


def _last_sequence(events: Path, suffix: str = "") -> int:
    numbers = [
        int(name.partition(".")[0])
        for name in os.listdir(events)
        if name[0].isdigit() and name.endswith(suffix)
    ]
    return max(numbers, default=-1)


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()

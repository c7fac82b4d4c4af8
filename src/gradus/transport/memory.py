"""A transport inside one process, for tests: the trainer is a thread beside the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import deque

from gradus.errors import DeadlineError, FencedError, ProtocolError
from gradus.transport.base import BatchReceiver, BatchSender
from gradus.transport.ledger import SendLedger
from gradus.wire.codec import decode_event, decode_rank_batch, encode, split_by_rank
from gradus.wire.events import Event, StepFinished
from gradus.wire.micro_batch import Batch, RankBatch


class MemoryTransport:
    """Holds batches and events as bytes, so both ends see exactly what a file would hold.

    >>> transport = MemoryTransport()
    >>> receiver = transport.receiver(term=1, rank=0)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: dict[int, tuple[int, list[bytes]]] = {}
        self._events: deque[bytes] = deque()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def sender(self, *, term: int, capacity: int) -> BatchSender:
        """The orchestrator's end; call it inside the running event loop."""
        return _Sender(self, SendLedger(term=term, capacity=capacity))

    def receiver(self, *, term: int, rank: int) -> BatchReceiver:
        """The end of rank `rank`."""
        return _Receiver(self, term, rank)

    def listen(self) -> asyncio.Event:
        """An event that is set, in the caller's loop, whenever the trainer says something."""
        event = asyncio.Event()
        self._listeners.append((asyncio.get_running_loop(), event))
        return event

    def put_batch(self, batch: Batch, parts: list[bytes]) -> None:
        """Offer a batch to the ranks."""
        with self._changed:
            self._batches[batch.step] = (batch.term, parts)
            self._changed.notify_all()

    def forget_batches_before(self, step: int) -> None:
        """Drop what was trained."""
        with self._changed:
            for old in [s for s in self._batches if s < step]:
                del self._batches[old]

    def take_batch(self, step: int, timeout_seconds: float) -> tuple[int, list[bytes]]:
        """Term and parts of batch `step`; DeadlineError when it does not come."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while step not in self._batches:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(
                        f"batch {step} did not come from the orchestrator in {timeout_seconds:g} s"
                    )
            return self._batches[step]

    def put_event(self, raw: bytes) -> None:
        """Append one event and wake the orchestrator."""
        self._events.append(raw)
        for loop, event in self._listeners:
            loop.call_soon_threadsafe(event.set)

    def take_events(self) -> list[bytes]:
        """Every event since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]


class _Sender:
    def __init__(self, transport: MemoryTransport, ledger: SendLedger) -> None:
        self._transport = transport
        self._ledger = ledger
        self._arrived: deque[Event] = deque()
        self._news = transport.listen()

    async def send(self, batch: Batch) -> None:
        parts = [encode(part) for part in split_by_rank(batch)]
        digest = hashlib.sha256(b"".join(parts)).hexdigest()
        if self._ledger.is_resend(batch, digest):
            return
        self._look_for_events()
        while not self._ledger.has_room:
            await self._wait_for_news()
        self._transport.put_batch(batch, parts)
        self._ledger.note_sent(batch.step, digest)

    async def receive_event(self) -> Event:
        self._look_for_events()
        while not self._arrived:
            await self._wait_for_news()
        return self._arrived.popleft()

    async def close(self) -> None:
        """Nothing is held open."""

    def _look_for_events(self) -> None:
        for raw in self._transport.take_events():
            event = decode_event(raw)
            self._ledger.note_event(event)
            if event.term == self._ledger.term:
                self._arrived.append(event)
            if isinstance(event, StepFinished):
                self._transport.forget_batches_before(event.step)

    async def _wait_for_news(self) -> None:
        await self._news.wait()
        self._news.clear()
        self._look_for_events()


class _Receiver:
    def __init__(self, transport: MemoryTransport, term: int, rank: int) -> None:
        self._transport = transport
        self._term = term
        self._rank = rank

    def receive(self, step: int, *, timeout_seconds: float) -> RankBatch:
        term, parts = self._transport.take_batch(step, timeout_seconds)
        if term != self._term:
            raise FencedError(
                f"batch {step} was written under term {term}; this trainer has term "
                f"{self._term} and must stop"
            )
        if self._rank >= len(parts):
            raise ProtocolError(
                f"batch {step} has parts for {len(parts)} ranks, this is rank {self._rank}"
            )
        return decode_rank_batch(parts[self._rank])

    def send_event(self, event: Event) -> None:
        if event.term != self._term:
            raise ProtocolError(
                f"event {type(event).__name__} carries term {event.term}, "
                f"its sender has {self._term}"
            )
        self._transport.put_event(encode(event))

    def close(self) -> None:
        """Nothing is held open."""

"""What a sender knows about its batches: which are unacknowledged, which are trained (pure)."""

from __future__ import annotations

from gradus.errors import FencedError, ProtocolError
from gradus.wire.events import BatchReceived, Event, StepFinished
from gradus.wire.micro_batch import Batch


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

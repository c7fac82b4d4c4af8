"""What the orchestrator and the trainer see of the spool: numbered batches one way, events back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gradus.wire.events import Event
from gradus.wire.micro_batch import Batch, RankBatch


class BatchesEnded(Exception):
    """The orchestrator says that this batch never comes: the run ends before its last step."""


class BatchSender(Protocol):
    """The orchestrator's end."""

    async def send(self, batch: Batch) -> None:
        """Make `batch` durable for the trainer. The same step twice is refused unless the content
        is the same (a resend)."""

    async def end(self, step: int) -> None:
        """Say that no batch from `step` on will come."""

    async def forget(self, step: int) -> None:
        """Delete the batches before `step`: no trainer starts again so far back."""

    async def receive_event(self) -> Event:
        """The trainer's next event, in order, each exactly once per term."""

    @property
    def last_handled(self) -> int:
        """The number of the last event that was handled: the next one was asked for."""

    async def forget_events(self, last: int) -> None:
        """An orchestrator that starts again need not hear of the events up to this number."""


class BatchReceiver(Protocol):
    """The end of one data-parallel rank of the trainer; blocking, because the trainer is."""

    def receive(
        self, step: int, *, timeout_seconds: float, check: Callable[[], None] = ...
    ) -> RankBatch:
        """This rank's part of batch `step`; BatchesEnded when none comes any more, DeadlineError
        after `timeout_seconds`,
        FencedError when the batch was written under another term. While it waits it calls `check`
        again and again, whose errors end the wait."""

    def send_event(self, event: Event) -> None:
        """Append one event for the orchestrator. Only rank 0 calls this, one thread at a time."""

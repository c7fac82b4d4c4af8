"""Writes what is final, one episode at a time, so that no other loop waits long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from gradus.monitor import Monitor
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.metrics import Metrics
from gradus.orchestrator.types import Group
from gradus.run.records import EVALUATION


@dataclass
class RecordWriter:
    """Owns the queue of final groups and numbers, on their way to disk and monitors."""

    monitor: Monitor
    episodes: EpisodeWriter
    check_lease: Callable[[], None]
    note: Callable[[Metrics, int], None] = lambda _metrics, _step: None
    """Hears of every complete record with its step, at once."""
    bound: Callable[[int], Awaitable[None]] | None = None
    """Makes room after the record of a step, when there is too much on the disk."""
    known: Collection[tuple[int, bool]] = ()
    """Steps and evaluations whose record a process before this one wrote."""
    _queue: asyncio.Queue[Callable[[], Awaitable[None]] | None] = field(
        default_factory=asyncio.Queue
    )

    @property
    def num_waiting(self) -> int:
        """Groups and records that are final and not written."""
        return self._queue.qsize()

    def add_group(self, group: Group, *, step: int) -> None:
        self._queue.put_nowait(partial(self._write_group, group, step))

    def add_metrics(self, metrics: Metrics | None, *, step: int) -> None:
        """Queue the numbers of a step; None means that they are not complete yet."""
        if metrics is not None:
            self.note(metrics, step)
            self._queue.put_nowait(partial(self._write_metrics, metrics, step))

    def mark(self, look: Callable[[], dict[str, int]]) -> asyncio.Future[dict[str, int]]:
        """What `look` sees once everything queued so far is written, and nothing later."""
        seen: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()

        async def see() -> None:
            seen.set_result(look())

        self._queue.put_nowait(see)
        return seen

    def close(self) -> None:
        """Let `run` return after the last entry."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        """Write until `close`.

        consumes: final groups and steps    waits for: the next one
        produces: lines on disk             unblocked by: collect, ship, refresh
        """
        while (write := await self._queue.get()) is not None:
            await write()

    async def _write_group(self, group: Group, step: int) -> None:
        for played in group.played:
            self.episodes.write(played, group, step=step)
            await asyncio.sleep(0)

    async def _write_metrics(self, metrics: Metrics, step: int) -> None:
        self.check_lease()
        if (step, EVALUATION in metrics) not in self.known:
            self.monitor.record(metrics, step=step)
        if self.bound is not None:
            await self.bound(step)

"""Writes what is final, one episode at a time, so that no other loop waits long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from gradus.monitor import Monitor
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.metrics import Metrics
from gradus.orchestrator.types import Group
from gradus.run.records import EVALUATION


@dataclass(frozen=True)
class _Episodes:
    """The played episodes of a group are final."""

    group: Group
    step: int


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a step are complete."""

    metrics: Metrics
    step: int


@dataclass(frozen=True)
class _Mark:
    """A request to look at the files at this point of the queue."""

    look: Callable[[], dict[str, int]]
    seen: asyncio.Future[dict[str, int]]


class RecordWriter:
    """Owns the queue of final groups and numbers, on their way to disk and monitors."""

    def __init__(
        self,
        monitor: Monitor,
        episodes: EpisodeWriter,
        check_lease: Callable[[], None],
        note: Callable[[Metrics, int], None] = lambda _metrics, _step: None,
        bound: Callable[[int], Awaitable[None]] | None = None,
        known: Collection[tuple[int, bool]] = (),
    ) -> None:
        """`note` hears of every complete record with its step, at once. `bound` makes room after
        the record of a step, when there is too much on the disk. `known` are the steps and
        evaluations whose record a process before this one wrote."""
        self._monitor = monitor
        self._episodes = episodes
        self._check_lease = check_lease
        self._note = note
        self._bound = bound
        self._known = known
        self._queue: asyncio.Queue[_Episodes | _Numbers | _Mark | None] = asyncio.Queue()

    @property
    def num_waiting(self) -> int:
        """Groups and records that are final and not written."""
        return self._queue.qsize()

    def add_group(self, group: Group, *, step: int) -> None:
        self._queue.put_nowait(_Episodes(group, step))

    def add_metrics(self, metrics: Metrics | None, *, step: int) -> None:
        """Queue the numbers of a step; None means that they are not complete yet."""
        if metrics is not None:
            self._note(metrics, step)
            self._queue.put_nowait(_Numbers(metrics, step))

    def mark(self, look: Callable[[], dict[str, int]]) -> asyncio.Future[dict[str, int]]:
        """What `look` sees once everything queued so far is written, and nothing later."""
        mark = _Mark(look, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(mark)
        return mark.seen

    def close(self) -> None:
        """Let `run` return after the last entry."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        """Write until `close`.

        consumes: final groups and steps    waits for: the next one
        produces: lines on disk             unblocked by: collect, ship, refresh
        """
        while (entry := await self._queue.get()) is not None:
            if isinstance(entry, _Mark):
                entry.seen.set_result(entry.look())
                continue
            if isinstance(entry, _Numbers):
                self._check_lease()
                if (entry.step, EVALUATION in entry.metrics) not in self._known:
                    self._monitor.record(entry.metrics, step=entry.step)
                if self._bound is not None:
                    await self._bound(entry.step)
                continue
            for played in entry.group.played:
                self._episodes.write(played, entry.group, step=entry.step)
                await asyncio.sleep(0)

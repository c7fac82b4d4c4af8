"""Batches in step order, each checked before the model sees it, and made ready a step ahead."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

from gradus.errors import ProtocolError
from gradus.heartbeat import beat
from gradus.log import get_logger
from gradus.trainer.distributed import World
from gradus.trainer.images.pixels import Pixels
from gradus.trainer.model.cpu.routing import Routers
from gradus.trainer.tensors import ReadyMicroBatch, check_trainable
from gradus.transport import SpoolReceiver
from gradus.wire.micro_batch import MicroBatch, RankBatch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

logger = get_logger(__name__)


@dataclass(frozen=True)
class StepBatch:
    """What this rank learns in one step."""

    updates: Sequence[Sequence[MicroBatch]]
    """The micro batches of each optimizer update; every rank has the same number of them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What only the source can say of the batch, over all ranks."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return list(chain.from_iterable(self.updates))


class BatchSource(Protocol):
    """Where batches come from: the orchestrator, conversations, or a random generator."""

    def receive(self, step: int) -> StepBatch:
        """This rank's part of batch `step`; all ranks call it together, in step order.

        BatchesEnded when no such batch will come.
        """


Prepared = TypeVar("Prepared")


class ReadAhead(Generic[Prepared]):
    """Makes what the next step needs on a thread while this one runs, and nothing beyond it.

    An error is raised by `take`, so at the step that would have used what could not be made.

    >>> with_squares = ReadAhead(lambda step: step * step, end_step=3)
    >>> [with_squares.take(step) for step in range(3)]
    [0, 1, 4]
    >>> with_squares.close()
    """

    def __init__(self, prepare: Callable[[int], Prepared], *, end_step: int) -> None:
        """`prepare` is called once for each step, in their order, never twice at a time."""
        self._prepare = prepare
        self._end_step = end_step
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._next: dict[int, Future[Prepared]] = {}

    def take(self, step: int) -> Prepared:
        """What `prepare` made for `step`; begins with the next one."""
        running = self._next.pop(step, None)
        prepared = self._prepare(step) if running is None else running.result()
        if step + 1 < self._end_step:
            self._next = {step + 1: self._pool.submit(self._prepare, step + 1)}
        return prepared

    def close(self) -> None:
        """End the thread, once `prepare` returns."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _StoppedError(Exception):
    """This look was stopped."""


@dataclass
class _Look:
    """A look for the batch of a step ahead of it."""

    step: int
    is_found: threading.Event = field(default_factory=threading.Event)
    is_stopped: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        if self.is_stopped.is_set():
            raise _StoppedError


@dataclass
class SpooledBatches:
    """The batches that the orchestrator sends.

    The ranks of one context group each read the part of their data-parallel rank. A batch that
    comes while a step runs is read, checked and made into tensors meanwhile.
    """

    receiver: SpoolReceiver
    world: World
    vocabulary: int
    routers: Routers | None
    """Which may take the experts of samples, where routing is replayed."""
    timeout_seconds: float
    end_step: int
    """No batch from here on is looked for."""
    check: Callable[[], None] = lambda: None
    """Raises what ends the wait for a batch: without the version before it may never come."""
    pixels: Pixels | None = None
    """Makes the images of samples, for a model that reads them."""
    _warned: set[bool] = field(default_factory=set)
    _look: _Look | None = None
    _found: Future[list[list[ReadyMicroBatch]]] | None = None
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="ahead")
    )

    def receive(self, step: int) -> StepBatch:
        """Wait for batch `step`; refuses content that cannot train, on all ranks together."""
        updates = self._take(step)
        self._check_alike(step, updates)
        if step + 1 < self.end_step:
            self._look = _Look(step + 1)
            self._found = self._pool.submit(self._find, self._look)
        return StepBatch(updates)

    def close(self) -> None:
        if self._look is not None:
            self._look.is_stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, step: int) -> list[list[ReadyMicroBatch]]:
        look, found = self._look, self._found
        if look is not None and found is not None and look.step == step:
            if look.is_found.is_set():
                return found.result()
            # It has not come yet; who waits hears of it first, and of what ends the wait.
            look.is_stopped.set()
        self.check()
        timeout = self.timeout_seconds
        batch = self.receiver.receive(step, timeout_seconds=timeout, check=self._wait)
        return self._ready(batch, step)

    def _wait(self) -> None:
        beat("waits for a batch")
        self.check()

    def _find(self, look: _Look) -> list[list[ReadyMicroBatch]]:
        """On the thread; without a deadline, since no step waits for it yet."""
        batch = self.receiver.receive(look.step, timeout_seconds=math.inf, check=look.check)
        look.is_found.set()
        return self._ready(batch, look.step)

    def _ready(self, batch: RankBatch, step: int) -> list[list[ReadyMicroBatch]]:
        self._check(batch, step)
        device = self.world.device
        return [
            [ReadyMicroBatch.of(micro_batch, device, self.pixels) for micro_batch in update]
            for update in batch.updates()
        ]

    def _check(self, batch: RankBatch, step: int) -> None:
        rank = self.world.data_rank
        if batch.step != step or batch.rank != rank:
            raise ProtocolError(
                f"received batch {batch.step} of rank {batch.rank}, expected batch {step} of rank "
                f"{rank}"
            )
        if not batch.micro_batches:
            raise ProtocolError(f"batch {step}: rank {rank} has no micro batches")
        for micro_batch in batch.micro_batches:
            check_trainable(micro_batch, self.vocabulary)
            if self.routers is not None:
                self.routers.check(micro_batch)

    def _check_alike(self, step: int, updates: Sequence[Sequence[MicroBatch]]) -> None:
        """Every rank runs the same number of collectives, or some would wait in vain."""
        sizes = [len(update) for update in updates]
        mine = zlib.crc32(repr(sizes).encode())
        told = [] if self.routers is None else self.routers.told(chain.from_iterable(updates))
        sums = self.world.sums({"sizes": mine, "samples": len(told), "told": sum(told)})
        if not self.world.all_agree(sums["sizes"] == mine * self.world.data_size):
            raise ProtocolError(
                f"batch {step}: ranks got different numbers of micro batches ({sum(sizes)} here)"
            )
        if self.world.is_first:
            self._warn_of_untold(step, int(sums["samples"]), int(sums["told"]))

    def _warn_of_untold(self, step: int, num_samples: int, num_told: int) -> None:
        """Once in a run of some samples, and once of a batch without any."""
        if num_told == num_samples or (is_any := num_told > 0) in self._warned:
            return
        self._warned.add(is_any)
        logger.warning(
            "batch %d: trainer.router_replay = 'engine', and %d of %d samples do not say which "
            "experts the engine chose; the trainer routes them itself%s",
            *(step, num_samples - num_told, num_samples),
            "" if is_any else "; is the engine started with the same config?",
        )


def pack_own_share(
    samples: Sequence[Sample],
    world: World,
    *,
    max_tokens: int,
    vocabulary: int,
    max_image_tokens: int | None = None,
) -> list[MicroBatch]:
    """The micro batches of this rank, of samples that every rank has."""
    size, limit = world.data_size, max_image_tokens
    ranks = pack(samples, max_tokens=max_tokens, num_ranks=size, max_image_tokens=limit)
    mine = ranks[world.data_rank]
    for micro_batch in mine:
        check_trainable(micro_batch, vocabulary)
    return mine

"""Batches in step order, each checked before the model sees it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from gradus.errors import ProtocolError
from gradus.trainer.distributed import World
from gradus.trainer.tensors import check_trainable
from gradus.transport import BatchReceiver
from gradus.wire.events import BatchReceived
from gradus.wire.micro_batch import MicroBatch, RankBatch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample


@dataclass(frozen=True)
class StepBatch:
    """What this rank learns in one step."""

    updates: Sequence[Sequence[MicroBatch]]
    """The micro batches of each optimizer update; every rank has the same number of them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What only the source can say of the batch, over all ranks."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all updates."""
        return list(chain.from_iterable(self.updates))


class BatchSource(Protocol):
    """Where batches come from: the orchestrator, conversations, or a random generator."""

    def receive(self, step: int) -> StepBatch:
        """This rank's part of batch `step`; all ranks call it together, in step order."""
        ...


@dataclass(frozen=True)
class SpooledBatches:
    """The batches that the orchestrator sends, each acknowledged once all ranks hold it.

    The ranks of one context group each read the part of their data-parallel rank.

    >>> batch = batches.receive(step=0)  # doctest: +SKIP
    """

    receiver: BatchReceiver
    world: World
    term: int
    vocabulary: int
    timeout_seconds: float

    def receive(self, step: int) -> StepBatch:
        """Wait for batch `step`; refuses content that cannot train, on all ranks together."""
        batch = self.receiver.receive(step, timeout_seconds=self.timeout_seconds)
        self._check(batch, step)
        updates = batch.updates()
        self._check_alike(step, [len(update) for update in updates])
        if self.world.is_first:
            self.receiver.send_event(BatchReceived(step=step, term=self.term))
        return StepBatch(updates)

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

    def _check_alike(self, step: int, sizes: Sequence[int]) -> None:
        """Every rank runs the same number of collectives, or some would wait in vain."""
        mine = zlib.crc32(repr(list(sizes)).encode())
        total = self.world.sums({"sizes": mine})["sizes"]
        if not self.world.all_agree(total == mine * self.world.data_size):
            raise ProtocolError(
                f"batch {step}: ranks got different numbers of micro batches ({sum(sizes)} here)"
            )


def pack_own_share(
    samples: Sequence[Sample], world: World, *, max_tokens: int, vocabulary: int
) -> list[MicroBatch]:
    """The micro batches of this rank, of samples that every rank has."""
    mine = pack(samples, max_tokens=max_tokens, num_ranks=world.data_size)[world.data_rank]
    for micro_batch in mine:
        check_trainable(micro_batch, vocabulary)
    return mine

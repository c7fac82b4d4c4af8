"""Batches in step order, each checked before the model sees it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from gradus.errors import ProtocolError
from gradus.trainer.distributed import World
from gradus.trainer.tensors import check_trainable
from gradus.transport.base import BatchReceiver
from gradus.wire.events import BatchReceived
from gradus.wire.micro_batch import MicroBatch, RankBatch


class BatchStream:
    """This rank's part of every batch; acknowledges a batch once all ranks hold it.

    The ranks of one context group each read the part of their data-parallel rank.

    >>> micro_batches = stream.receive(step=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        receiver: BatchReceiver,
        world: World,
        *,
        term: int,
        vocabulary: int,
        timeout_seconds: float,
    ) -> None:
        self._receiver = receiver
        self._world = world
        self._term = term
        self._vocabulary = vocabulary
        self._timeout_seconds = timeout_seconds

    def receive(self, step: int) -> list[list[MicroBatch]]:
        """Wait for batch `step`; the micro batches of each update.

        Refuses content that cannot train, on all ranks together.
        """
        batch = self._receiver.receive(step, timeout_seconds=self._timeout_seconds)
        self._check(batch, step)
        updates = batch.updates()
        self._check_alike(step, [len(update) for update in updates])
        if self._world.is_first:
            self._receiver.send_event(BatchReceived(step=step, term=self._term))
        return updates

    def _check(self, batch: RankBatch, step: int) -> None:
        rank = self._world.data_rank
        if batch.step != step or batch.rank != rank:
            raise ProtocolError(
                f"received batch {batch.step} of rank {batch.rank}, expected batch {step} of rank "
                f"{rank}"
            )
        if not batch.micro_batches:
            raise ProtocolError(f"batch {step}: rank {rank} has no micro batches")
        for micro_batch in batch.micro_batches:
            check_trainable(micro_batch, self._vocabulary)

    def _check_alike(self, step: int, sizes: Sequence[int]) -> None:
        """Every rank runs the same number of collectives, or all of them would wait for ever."""
        mine = zlib.crc32(repr(list(sizes)).encode())
        total = self._world.sums({"sizes": mine})["sizes"]
        if not self._world.all_agree(total == mine * self._world.data_size):
            raise ProtocolError(
                f"batch {step}: ranks got different numbers of micro batches ({sum(sizes)} here)"
            )

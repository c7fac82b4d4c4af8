"""A micro batch is packed samples for one forward on one rank; a batch is all of one step."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from gradus.errors import ProtocolError
from gradus.wire.sample import (
    BoolArray,
    FloatArray,
    IntArray,
    check_arrays,
    check_loss_names,
    check_reference,
)
from gradus.wire.versions import VersionSpan


class MicroBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples laid end to end; arrays have shape [T], T = sum of `sequence_lengths`.

    A dummy micro batch (all loss weights 0) keeps ranks in step; it has no sample ids.
    """

    sample_ids: list[str]
    sequence_lengths: list[int]
    token_ids: IntArray
    position_ids: IntArray
    """0-based position inside the token's own sample."""
    loss_mask: BoolArray
    sampling_logprobs: FloatArray
    temperatures: FloatArray
    advantages: FloatArray
    reference_logprobs: FloatArray
    """NaN where no reference model scored."""
    loss_weights: dict[str, FloatArray]

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def is_dummy(self) -> bool:
        return not self.sample_ids

    def arrays(self) -> dict[str, np.ndarray]:
        """Every per-token array by name."""
        per_token = {
            "token_ids": self.token_ids,
            "position_ids": self.position_ids,
            "loss_mask": self.loss_mask,
            "sampling_logprobs": self.sampling_logprobs,
            "temperatures": self.temperatures,
            "advantages": self.advantages,
            "reference_logprobs": self.reference_logprobs,
        }
        return per_token | {f"loss_weights.{name}": w for name, w in self.loss_weights.items()}

    def check(self) -> None:
        """Refuse ragged or non-finite content with a ProtocolError that names the field."""
        length = len(self)
        if sum(self.sequence_lengths) != length:
            raise ProtocolError(
                f"micro batch: sequence_lengths add up to {sum(self.sequence_lengths)}, "
                f"tokens are {length}"
            )
        check_arrays("micro batch", self.arrays(), length)
        check_loss_names("micro batch", self.loss_weights)
        check_reference("micro batch", self.reference_logprobs, self.loss_weights)


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All micro batches of one step; every rank gets the same number of them."""

    step: int
    """Version that this batch trains; also its sequence number in the transport."""
    term: int
    """Term of the writer's lease on the run directory."""
    versions: VersionSpan
    ranks: list[list[MicroBatch]]
    """`ranks[r]` are the micro batches of data-parallel rank r, in order."""
    update_sizes: list[int] = []
    """How many micro batches of each rank belong to each optimizer update, in order; empty when all
    belong to one."""


class RankBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one data-parallel rank reads of a batch."""

    step: int
    term: int
    rank: int
    versions: VersionSpan
    micro_batches: list[MicroBatch]
    update_sizes: list[int] = []
    """As in `Batch`."""

    def updates(self) -> list[list[MicroBatch]]:
        """The micro batches of each optimizer update; ProtocolError when the sizes do not fit."""
        sizes = self.update_sizes or [len(self.micro_batches)]
        if min(sizes) < 1 or sum(sizes) != len(self.micro_batches):
            raise ProtocolError(
                f"batch {self.step}: updates of {sizes} micro batches do not add up to the "
                f"{len(self.micro_batches)} of rank {self.rank}"
            )
        remaining = iter(self.micro_batches)
        return [list(itertools.islice(remaining, size)) for size in sizes]

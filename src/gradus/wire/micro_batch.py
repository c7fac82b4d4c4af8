"""A micro batch is packed samples for one forward on one rank; a batch is all of one step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from gradus.errors import ProtocolError
from gradus.wire.images import ImageSpan, check_spans
from gradus.wire.sample import Sample
from gradus.wire.tokens import COUNTED_BY_TRACE, IntArray, TokenArrays
from gradus.wire.versions import VersionRuns, VersionSpan


class MicroBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples laid end to end.

    A dummy micro batch (all loss weights 0) keeps ranks in step; it has no sample ids.
    """

    sample_ids: list[str]
    sequence_lengths: list[int]
    arrays: TokenArrays
    """[T], T = sum of `sequence_lengths`."""
    trace_members: dict[str, list[int]] = {}
    """By the names of `COUNTED_BY_TRACE`, for each sample: the tokens that train in all branches of
    its trace that are learned in the same update, wherever they lie. Empty where each sample is a
    whole trace."""
    versions: list[VersionSpan] = []
    """Which versions sampled each sample; empty in a dummy."""
    token_versions: list[VersionRuns] = []
    """Which versions sampled the tokens of each sample, as in `Sample`; empty in a dummy."""
    environments: list[str] = []
    """The source of each sample; empty in a dummy."""
    images: list[list[ImageSpan]] = []
    """Of each sample, as in `Sample`: places count from its own first token. Empty where no sample
    has an image."""

    @classmethod
    def join(
        cls, samples: Sequence[Sample], trace_members: Mapping[str, Mapping[str, int]] | None = None
    ) -> MicroBatch:
        """The samples in the order given; `trace_members` has the counts of each trace."""
        counts = trace_members or {}
        return cls(
            sample_ids=[sample.id for sample in samples],
            sequence_lengths=[len(sample) for sample in samples],
            arrays=TokenArrays.concat([sample.arrays for sample in samples]),
            trace_members={
                name: [of_trace[sample.trace_id] for sample in samples]
                for name, of_trace in counts.items()
            },
            versions=[sample.versions for sample in samples],
            token_versions=[sample.token_versions for sample in samples],
            environments=[sample.environment for sample in samples],
            images=[s.images for s in samples] if any(s.images for s in samples) else [],
        )

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def is_dummy(self) -> bool:
        return not self.sample_ids

    @property
    def position_ids(self) -> IntArray:
        """0-based position of each token inside its own sample, [T]."""
        return np.concatenate([np.arange(n, dtype=np.int32) for n in self.sequence_lengths])

    def check(self) -> None:
        """Refuse ragged or non-finite content with a ProtocolError that names the field."""
        lengths = self.sequence_lengths
        if not lengths or min(lengths) < 1:
            raise ProtocolError(f"micro batch: sequence_lengths {lengths} must be positive")
        if sum(lengths) != len(self):
            raise ProtocolError(
                f"micro batch: sequence_lengths add up to {sum(lengths)}, tokens are {len(self)}"
            )
        for name, counts in self.trace_members.items():
            if name not in COUNTED_BY_TRACE or len(counts) != len(lengths) or min(counts) < 0:
                raise ProtocolError(f"micro batch: trace_members[{name!r}] is {counts}")
        self.arrays.check("micro batch")
        if not self.images:
            return
        if len(self.images) != len(lengths):
            raise ProtocolError(
                f"micro batch: images of {len(self.images)} samples, there are {len(lengths)}"
            )
        masks = np.split(self.arrays.loss_mask, np.cumsum(lengths)[:-1])
        for number, (spans, mask) in enumerate(zip(self.images, masks, strict=True)):
            check_spans(spans, mask, f"micro batch: sample {number}")


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

    def by_rank(self) -> list[RankBatch]:
        """What each rank reads, in their order."""
        return [
            RankBatch(self.step, self.term, rank, self.versions, micro_batches, self.update_sizes)
            for rank, micro_batches in enumerate(self.ranks)
        ]


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

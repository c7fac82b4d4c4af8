"""Samples of one step become the wire's batch, packed for every rank (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from gradus.wire.micro_batch import Batch
from gradus.wire.packing import pack
from gradus.wire.policy import VersionSpan
from gradus.wire.sample import Sample


@dataclass(frozen=True)
class Layout:
    """How the trainer splits a batch."""

    num_ranks: int
    max_tokens: int
    """Most tokens of one micro batch."""


def build_batch(samples: Sequence[Sample], *, step: int, epoch: int, layout: Layout) -> Batch:
    """The packed batch of `step`; every sample is checked first, and an empty list refused."""
    for sample in samples:
        sample.check()
    ranks = pack(samples, max_tokens=layout.max_tokens, num_ranks=layout.num_ranks)
    versions = reduce(VersionSpan.merge, [sample.versions for sample in samples])
    return Batch(step=step, epoch=epoch, versions=versions, ranks=ranks)

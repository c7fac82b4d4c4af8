"""Samples of one step become the wire's batch, with a digest of every field (pure).

The digests cover what trains, not how it is packed: another number of ranks, another size of the
micro batches or another launch of the same run gives the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import numpy as np

from gradus.config import RunProcessConfig
from gradus.run.model_files import image_tokens
from gradus.wire.micro_batch import Batch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

_HEX_DIGITS = 16


@dataclass(frozen=True)
class Layout:
    """How the trainer splits a batch."""

    num_ranks: int
    max_tokens: int
    """Most tokens of one micro batch."""
    num_updates: int = 1
    """Parts that are learned one after the other."""
    max_image_tokens: int | None = None
    """Most placeholders of its different images; None means no bound."""

    @classmethod
    def of(cls, config: RunProcessConfig) -> Layout:
        trainer = config.trainer
        return cls(
            config.data_parallel_size,
            trainer.micro_batch_tokens,
            trainer.updates_per_batch,
            image_tokens(trainer.micro_batch_patches, config.model.name),
        )


def build_batch(samples: Sequence[Sample], *, step: int, term: int, layout: Layout) -> Batch:
    """The packed batch of `step`; every sample is checked first, and an empty list refused."""
    for sample in samples:
        sample.check()
    parts = split_by_group(samples, layout.num_updates)
    packed = [
        pack(
            part,
            max_tokens=layout.max_tokens,
            num_ranks=layout.num_ranks,
            max_image_tokens=layout.max_image_tokens,
        )
        for part in parts
    ]
    return Batch(
        step=step,
        term=term,
        versions=reduce(VersionSpan.merge, [sample.versions for sample in samples]),
        ranks=[list(chain.from_iterable(of_rank)) for of_rank in zip(*packed, strict=True)],
        update_sizes=[len(ranks[0]) for ranks in packed] if len(packed) > 1 else [],
    )


def split_by_group(samples: Sequence[Sample], num_parts: int) -> list[list[Sample]]:
    """The samples in parts whose numbers of groups differ by one at most, in their order.

    A group stays whole. With fewer groups than parts, there is one part for each group.
    """
    if num_parts == 1:
        return [list(samples)]
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    members = list(groups.values())
    count = min(num_parts, len(members))
    ends = [len(members) * number // count for number in range(count + 1)]
    return [
        list(chain.from_iterable(members[start:end])) for start, end in itertools.pairwise(ends)
    ]


def digest_samples(samples: Sequence[Sample]) -> dict[str, str]:
    """One digest per field over all samples, in their order."""
    arrays = [sample.arrays.by_name() for sample in samples]
    names = {name for found in arrays for name in found}
    digests = {name: _digest_arrays([found.get(name) for found in arrays]) for name in names}
    spans = " ".join(f"{s.versions.oldest}-{s.versions.newest}" for s in samples)
    digests["versions"] = hashlib.sha256(spans.encode()).hexdigest()[:_HEX_DIGITS]
    return dict(sorted(digests.items()))


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first field, by name, whose digests are not the same; None when all are."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return name
    return None


def _digest_arrays(arrays: Sequence[np.ndarray | None]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"-")
            continue
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:_HEX_DIGITS]

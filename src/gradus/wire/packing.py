"""Packing lays samples end to end into micro batches, as many on every rank, of like cost.

Pure and deterministic: the same samples give the same micro batches, and no choice made here may
change the loss or the gradient of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradus.errors import ConfigError, EmptyBatchError
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import Sample

ATTENTION_TOKENS = 4096
"""Length of a sample at which attention costs about as much as all other layers."""
_DUMMY_TOKENS = 2


def pack(samples: Sequence[Sample], *, max_tokens: int, num_ranks: int) -> list[list[MicroBatch]]:
    """Micro batches of at most `max_tokens` tokens, an equal number of them for every rank.

    Refuses an empty batch and a sample longer than `max_tokens`. Every sample appears once.
    """
    if not samples:
        raise EmptyBatchError("no samples to pack; the trainer never gets an empty batch")
    for sample in samples:
        if len(sample) > max_tokens:
            raise ConfigError(
                f"sample {sample.id} has {len(sample)} tokens, a micro batch holds {max_tokens}; "
                "raise micro_batch_tokens or lower max_length_tokens"
            )
    bins = fill_bins([len(sample) for sample in samples], max_tokens)
    bins = split_bins(bins, [sample_cost(len(sample)) for sample in samples], num_ranks)
    micro_batches = [join_samples([samples[i] for i in chosen]) for chosen in bins]
    while len(micro_batches) % num_ranks:
        micro_batches.append(build_dummy(samples[0]))
    return _share_out(micro_batches, num_ranks)


def sample_cost(length: int) -> float:
    """Relative cost of one sample: linear for the layers, quadratic for attention."""
    return length + length * length / ATTENTION_TOKENS


def fill_bins(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First-fit-decreasing: indices into `lengths`, each bin at most `max_tokens`."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([])
            room.append(max_tokens)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= length
    return bins


def split_bins(
    bins: Sequence[Sequence[int]], costs: Sequence[float], num_ranks: int
) -> list[list[int]]:
    """Halve the dearest bins until their count divides by `num_ranks`, or none can be halved."""
    result = [list(chosen) for chosen in bins]
    while len(result) % num_ranks:
        divisible = [b for b, chosen in enumerate(result) if len(chosen) > 1]
        if not divisible:
            return result
        dearest = max(divisible, key=lambda b: (sum(costs[i] for i in result[b]), -b))
        chosen = result.pop(dearest)
        halves = balance([costs[i] for i in chosen], 2)
        result.extend([chosen[i] for i in half] for half in halves)
    return result


@dataclass(frozen=True)
class _Partial:
    """Unfinished parts of a partition: (cost, indices), dearest first."""

    parts: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def spread(self) -> float:
        return self.parts[0][0] - self.parts[-1][0]

    def merge(self, other: _Partial) -> _Partial:
        """Join the dearest part of one with the cheapest of the other, and so on."""
        joined = [
            (mine + theirs, indices + more)
            for (mine, indices), (theirs, more) in zip(
                self.parts, reversed(other.parts), strict=True
            )
        ]
        return _Partial(tuple(sorted(joined, key=lambda part: (-part[0], part[1]))))


def balance(
    costs: Sequence[float], num_parts: int, *, equal_counts: bool = False
) -> list[list[int]]:
    """Karmarkar-Karp: indices of `costs` in `num_parts` parts of nearly equal sums.

    With `equal_counts` every part gets the same number of indices; `len(costs)` must then be a
    multiple of `num_parts`.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    width = num_parts if equal_counts else 1
    heap: list[tuple[float, int, _Partial]] = []
    for number, start in enumerate(range(0, len(order), width)):
        block = [(costs[i], (i,)) for i in order[start : start + width]]
        empty: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (num_parts - len(block))
        partial = _Partial((*block, *empty))
        heap.append((-partial.spread, number, partial))
    heapq.heapify(heap)
    for number in range(len(order), len(order) + len(heap) - 1):
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        merged = first.merge(second)
        heapq.heappush(heap, (-merged.spread, number, merged))
    return [sorted(indices) for _, indices in heap[0][2].parts]


def join_samples(samples: Sequence[Sample]) -> MicroBatch:
    """The samples laid end to end, in the order given."""
    names = sorted({name for sample in samples for name in sample.loss_weights})
    lengths = [len(sample) for sample in samples]
    return MicroBatch(
        sample_ids=[sample.id for sample in samples],
        sequence_lengths=lengths,
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        position_ids=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        sampling_logprobs=np.concatenate([sample.sampling_logprobs for sample in samples]),
        temperatures=np.concatenate([sample.temperatures for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        reference_logprobs=np.concatenate([sample.reference_logprobs for sample in samples]),
        loss_weights={
            name: np.concatenate(
                [s.loss_weights.get(name, np.zeros(len(s), np.float32)) for s in samples]
            )
            for name in names
        },
    )


def build_dummy(sample: Sample) -> MicroBatch:
    """A micro batch that trains nothing; its tokens come from `sample`, so they are valid ids."""
    length = min(len(sample), _DUMMY_TOKENS)
    zeros = np.zeros(length, np.float32)
    return MicroBatch(
        sample_ids=[],
        sequence_lengths=[length],
        token_ids=sample.token_ids[:length].copy(),
        position_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.zeros(length, np.bool_),
        sampling_logprobs=zeros,
        temperatures=np.ones(length, np.float32),
        advantages=zeros,
        reference_logprobs=np.full(length, np.nan, np.float32),
        loss_weights={},
    )


def _share_out(micro_batches: Sequence[MicroBatch], num_ranks: int) -> list[list[MicroBatch]]:
    """Deal micro batches to ranks, dearest first on each, so that ranks wait little."""
    costs = [
        0.0 if m.is_dummy else sum(sample_cost(length) for length in m.sequence_lengths)
        for m in micro_batches
    ]
    parts = balance(costs, num_ranks, equal_counts=True)
    return [
        [micro_batches[i] for i in sorted(part, key=lambda i: (-costs[i], i))] for part in parts
    ]

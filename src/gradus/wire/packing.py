"""Samples become micro batches: the same number for every rank, of similar cost.

Pure and deterministic: the same samples give the same micro batches, and how they are packed does
not change the loss or the gradient of a step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradus.errors import ConfigError, EmptyBatchError
from gradus.wire.images import ImageSpan
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import Sample
from gradus.wire.tokens import COUNTED_BY_TRACE, TokenArrays

ATTENTION_TOKENS = 4096
"""Length of a sample at which attention costs about as much as all other layers."""
_DUMMY_TOKENS = 2


def pack(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    num_ranks: int,
    max_image_tokens: int | None = None,
) -> list[list[MicroBatch]]:
    """Micro batches of at most `max_tokens` tokens, an equal number of them for every rank, whose
    different images have at most `max_image_tokens` placeholders.

    Refuses an empty batch and a sample that is more than either. Every sample appears once.
    """
    if not samples:
        raise EmptyBatchError("no samples to pack; the trainer never gets an empty batch")
    for sample in samples:
        if len(sample) > max_tokens:
            raise ConfigError(
                f"sample {sample.id} has {len(sample)} tokens, a micro batch holds {max_tokens}; "
                "raise micro_batch_tokens or lower max_length_tokens"
            )
        if max_image_tokens is not None and image_tokens([sample.images]) > max_image_tokens:
            raise ConfigError(f"sample {sample.id}: {too_many_patches(sample.images)}")
    images = None if max_image_tokens is None else [sample.images for sample in samples]
    bins = fill_bins([len(sample) for sample in samples], max_tokens, images, max_image_tokens or 0)
    costs = [sample_cost(len(it)) + image_tokens([it.images]) for it in samples]
    bins = split_bins(bins, costs, num_ranks)
    counts = _trace_members(samples)
    micro_batches = [MicroBatch.join([samples[i] for i in chosen], counts) for chosen in bins]
    while len(micro_batches) % num_ranks:
        micro_batches.append(build_dummy(samples[0]))
    return _share_out(micro_batches, num_ranks)


def _trace_members(samples: Sequence[Sample]) -> dict[str, Counter[str]]:
    """By the names of `COUNTED_BY_TRACE`, the tokens of each trace that train; nothing where no
    trace has several branches."""
    if len({sample.trace_id for sample in samples}) == len(samples):
        return {}
    found: dict[str, Counter[str]] = {name: Counter() for name in COUNTED_BY_TRACE}
    for sample in samples:
        for name, components in COUNTED_BY_TRACE.items():
            found[name][sample.trace_id] += sample.arrays.num_members(components)
    return found


def image_tokens(images: Iterable[Sequence[ImageSpan]]) -> int:
    """Placeholders of the different images of some samples: so much a tower makes, which costs
    about as much as so many tokens do elsewhere."""
    return sum({span.sha256: span.length for spans in images for span in spans}.values())


def too_many_patches(images: Sequence[ImageSpan]) -> str:
    """Why a sample fits no micro batch whose patches are bounded."""
    largest = max(images, key=lambda it: it.length)
    return (
        f"its {len(images)} images stand for {image_tokens([images]):,} tokens, the largest for "
        f"{largest.length:,}, and their patches are more than micro_batch_patches lets into one "
        "micro batch; raise it, or show smaller images"
    )


def sample_cost(length: int) -> float:
    """Relative cost of one sample: linear for the layers, quadratic for attention."""
    return length + length * length / ATTENTION_TOKENS


def fill_bins(
    lengths: Sequence[int],
    max_tokens: int,
    images: Sequence[Sequence[ImageSpan]] | None = None,
    max_image_tokens: int = 0,
) -> list[list[int]]:
    """First-fit-decreasing: indices into `lengths`, each bin at most `max_tokens`, and its `images`
    at most `max_image_tokens`, each different one counted once."""
    bins: list[list[int]] = []
    room: list[int] = []

    def holds(place: int, index: int) -> bool:
        if images is None or not images[index]:
            return True
        of_bin = (images[it] for it in (*bins[place], index))
        return image_tokens(of_bin) <= max_image_tokens

    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = next((b for b, it in enumerate(room) if it >= length and holds(b, index)), None)
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
    """Halve the costliest bins until their number is a multiple of `num_ranks`, if they can be."""
    result = [list(chosen) for chosen in bins]
    while len(result) % num_ranks:
        divisible = [b for b, chosen in enumerate(result) if len(chosen) > 1]
        if not divisible:
            return result
        costliest = max(divisible, key=lambda b: (sum(costs[i] for i in result[b]), -b))
        chosen = result.pop(costliest)
        halves = balance([costs[i] for i in chosen], 2)
        result.extend([chosen[i] for i in half] for half in halves)
    return result


@dataclass(frozen=True)
class _Partial:
    """Unfinished parts of a partition: (cost, indices), costliest first."""

    parts: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def spread(self) -> float:
        return self.parts[0][0] - self.parts[-1][0]

    def merge(self, other: _Partial) -> _Partial:
        """Join the costliest part of one with the cheapest of the other, and so on."""
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


def build_dummy(sample: Sample) -> MicroBatch:
    """A micro batch that trains nothing; its tokens come from `sample`, so they are valid ids."""
    token_ids = sample.arrays.token_ids[:_DUMMY_TOKENS].copy()
    return MicroBatch([], [len(token_ids)], TokenArrays.build(token_ids, {}))


def _share_out(micro_batches: Sequence[MicroBatch], num_ranks: int) -> list[list[MicroBatch]]:
    """Deal micro batches to ranks, costliest first on each, so that no rank waits long."""
    costs = [
        0.0
        if m.is_dummy
        else sum(sample_cost(length) for length in m.sequence_lengths) + image_tokens(m.images)
        for m in micro_batches
    ]
    parts = balance(costs, num_ranks, equal_counts=True)
    return [
        [micro_batches[i] for i in sorted(part, key=lambda i: (-costs[i], i))] for part in parts
    ]

"""Which tokens of a micro batch are this rank's, where ranks share them.

Each rank runs all layers on its part of the tokens; what mixes tokens asks the others. Shared by
heads, a part is a stretch of the row. In a ring each sample is cut into 2 · ranks pieces, of which
a rank has one from the front and its counterpart from the back, so that all compute alike much of a
causal triangle. By heads (Ulysses, arXiv 2309.14509), an all-to-all around attention turns "a part
of the tokens, all heads" into "all tokens, a part of the heads" and back.

Shapes: T tokens of the row, with padding where ranks share heads; P tokens of one rank, N target
tokens, H heads, D the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from gradus.trainer.distributed import ContextGroup, named_failures


@dataclass(frozen=True)
class ContextPart:
    """This rank's part of a micro batch."""

    tokens: Tensor
    """[P] tokens of the row; T for padding, which trains nothing."""
    lengths: tuple[int, ...]
    """Of the samples of the row that attention reads: by heads those of the whole row, with padding
    as a sample of its own; in a ring those of this part."""
    num_tokens: int
    """T."""
    group: ContextGroup

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, group: ContextGroup) -> ContextPart:
        """The part of the rank that asks, of samples of these lengths."""
        if group.is_ring:
            tokens = np.concatenate(zigzag(lengths, group))
            sizes = tuple(2 * piece_length(length, group.size) for length in lengths)
            return cls(torch.from_numpy(tokens).to(device), sizes, sum(lengths), group)
        num_tokens = sum(lengths)
        padding = -num_tokens % group.size
        share = (num_tokens + padding) // group.size
        first = group.rank * share
        part = torch.arange(first, first + share, device=device).clamp_(max=num_tokens)
        sizes = (*lengths, padding) if padding else tuple(lengths)
        return cls(part, sizes, num_tokens, group)

    def own(self, per_token: Tensor, *, padding: int = 0) -> Tensor:
        """[P, ...]: this rank's part of a tensor [T, ...]."""
        filler = per_token.new_full((1, *per_token.shape[1:]), padding)
        return torch.cat([per_token, filler]).index_select(0, self.tokens)

    def own_targets(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the positions [N] lie in this part, and where."""
        places = self.tokens.new_full((self.num_tokens + 1,), -1)
        places[self.tokens] = torch.arange(len(self.tokens), device=places.device)
        found = places[states]
        mine = (found >= 0).nonzero()[:, 0]
        return mine, found[mine]


def piece_length(length: int, num_ranks: int) -> int:
    """Tokens of each of the 2 · ranks pieces of a sample, the last of which are filled up.

    >>> piece_length(9, 2)
    3
    """
    return -(-length // (2 * num_ranks))


def count_ring_padding(lengths: Sequence[int], num_ranks: int) -> int:
    """What fills up the pieces of samples of these lengths, over all ranks."""
    return sum(2 * num_ranks * piece_length(it, num_ranks) - it for it in lengths)


def zigzag(lengths: Sequence[int], group: ContextGroup) -> list[np.ndarray]:
    """The tokens of this rank's two pieces of each sample, which come in the sample's order."""
    num_tokens, start, found = sum(lengths), 0, []
    for length in lengths:
        size = piece_length(length, group.size)
        for piece in (group.rank, 2 * group.size - 1 - group.rank):
            place = np.arange(piece * size, (piece + 1) * size)
            found.append(np.where(place < length, start + place, num_tokens))
        start += length
    return found


def scatter_heads(tokens: Tensor, group: ContextGroup) -> Tensor:
    """[P, H, D] of this rank's tokens → [T, H / ranks, D] of this rank's heads."""
    part, heads, size = tokens.shape
    by_rank = tokens.view(part, group.size, heads // group.size, size).transpose(0, 1)
    received = all_to_all_single(by_rank.contiguous(), None, None, group.group)
    return received.reshape(group.size * part, heads // group.size, size)


def gather_heads(tokens: Tensor, group: ContextGroup) -> Tensor:
    """[T, H / ranks, D] of this rank's heads → [P, H, D] of this rank's tokens."""
    whole, heads, size = tokens.shape
    part = whole // group.size
    by_rank = tokens.reshape(group.size, part, heads, size)
    received = all_to_all_single(by_rank.contiguous(), None, None, group.group)
    return received.transpose(0, 1).reshape(part, group.size * heads, size)


def own_heads(parts: Sequence[Tensor], group: ContextGroup) -> list[Tensor]:
    """All tokens [T, H / ranks, ...] of this rank's heads, of tensors [P, H, ...] of its own; one
    transfer for those of one dtype. Heads fewer than ranks are copied."""
    by_rank = [_copied(it, group).reshape(len(it), group.size, -1) for it in parts]
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(it.dtype for it in parts):
        chosen = [i for i, it in enumerate(parts) if it.dtype == dtype]
        mixed = torch.cat([by_rank[i] for i in chosen], dim=2)
        split = torch.split(
            scatter_heads(mixed, group)[:, 0], [by_rank[i].shape[2] for i in chosen], dim=1
        )
        for i, own in zip(chosen, split, strict=True):
            found[i] = own.reshape(len(own), -1, *parts[i].shape[2:])
    return [found[i] for i in range(len(parts))]


def own_part(per_head: Tensor, group: ContextGroup) -> Tensor:
    """[H / ranks, ...]: this rank's part of a parameter [H, ...]; the others add up its gradient.
    Heads fewer than ranks are copied."""
    return _copied(per_head[None], group)[0].chunk(group.size)[group.rank]


def _copied(tokens: Tensor, group: ContextGroup) -> Tensor:
    """[P, H, ...], with heads repeated until every rank gets one."""
    copies = max(1, group.size // tokens.shape[1])
    assert copies * tokens.shape[1] % group.size == 0, "heads that the config did not name"
    return tokens if copies == 1 else tokens.repeat_interleave(copies, dim=1)


def gather_targets(values: Tensor, part: Tensor, num_targets: int, group: ContextGroup) -> Tensor:
    """[N]: the values of all ranks' targets, on every rank; `part` says which of them are mine."""
    whole: Tensor = _GatherTargets.apply(values, part, num_targets, group)  # type: ignore[no-untyped-call]
    return whole


class _GatherTargets(torch.autograd.Function):
    """Every rank computes the same loss from the same values, so backward needs no transfer: each
    rank keeps the gradient of its own targets."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, part: Tensor, num_targets: int, group: ContextGroup
    ) -> Tensor:
        ctx.part = part
        whole = values.new_zeros(num_targets).index_copy_(0, part, values)
        with named_failures("gather logprobs over context-parallel ranks"):
            dist.all_reduce(whole, group=group.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0].index_select(0, ctx.part), None, None, None

"""Context parallelism: ranks share the tokens of a micro batch, and in attention its heads.

Ulysses (arXiv 2309.14509): each rank runs all layers on its part of the tokens. Around attention an
all-to-all turns "a part of the tokens, all heads" into "all tokens, a part of the heads" and back,
so attention itself stays exact and unchanged.

Shapes: T tokens of the padded row, P = T / ranks tokens of one rank, H heads, D the size of a head,
N target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from gradus.trainer.distributed import ContextGroup, named_failures


@dataclass(frozen=True)
class ContextPart:
    """This rank's part of a micro batch: tokens `start` to `stop` of the row, padded to divide."""

    start: int
    stop: int
    padding: int
    """Tokens added at the end of the row; they form a sample of their own that trains nothing."""
    group: ContextGroup

    @classmethod
    def of(cls, num_tokens: int, group: ContextGroup) -> ContextPart:
        """The part of the rank that asks."""
        padding = -num_tokens % group.size
        share = (num_tokens + padding) // group.size
        return cls(group.rank * share, (group.rank + 1) * share, padding, group)

    def own(self, per_token: Tensor) -> Tensor:
        """[P, ...]: this rank's part of a per-token tensor; padding is 0."""
        widths = [0, 0] * (per_token.ndim - 1) + [0, self.padding]
        return torch.nn.functional.pad(per_token, widths)[self.start : self.stop]

    def own_targets(self, states: Tensor) -> slice:
        """Which of the ascending positions [N] lie in this part."""
        bounds = torch.tensor([self.start, self.stop], device=states.device)
        first, end = torch.searchsorted(states, bounds).tolist()
        return slice(first, end)


def gather_targets(values: Tensor, part: slice, num_targets: int, group: ContextGroup) -> Tensor:
    """[N]: the values of all ranks' targets, on every rank; `part` says which of them are mine."""
    whole: Tensor = _GatherTargets.apply(values, part, num_targets, group)  # type: ignore[no-untyped-call]
    return whole


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


def copy_key_heads(tokens: Tensor, group: ContextGroup) -> Tensor:
    """[P, K, D], with key heads repeated until every rank gets one."""
    copies = max(1, group.size // tokens.shape[1])
    return tokens if copies == 1 else tokens.repeat_interleave(copies, dim=1)


def own_part(per_head: Tensor | None, group: ContextGroup) -> Tensor | None:
    """[H / ranks]: this rank's part of a parameter [H]; the others add up its gradient."""
    return None if per_head is None else per_head.chunk(group.size)[group.rank]


class _GatherTargets(torch.autograd.Function):
    """Every rank computes the same loss from the same values, so backward needs no transfer: each
    rank keeps the gradient of its own targets."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, part: slice, num_targets: int, group: ContextGroup
    ) -> Tensor:
        ctx.part = part
        whole = values.new_zeros(num_targets)
        whole[part] = values
        with named_failures("gather logprobs over context-parallel ranks"):
            dist.all_reduce(whole, group=group.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.part], None, None, None

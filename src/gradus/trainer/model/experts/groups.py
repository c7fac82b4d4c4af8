"""Rows of tokens, sorted into one group for each expert, and the way back.

Both ways are selections, and so are their gradients: of a token's rows a sum over its experts, by
the inverse permutation, in the place of a slow scatter-add. Shapes: T tokens, k experts of a token,
E experts, R rows of all groups, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Which row each choice of an expert has.

    >>> Groups.of(torch.tensor([[2, 0], [0, 1]]), num_experts=3).ends
    tensor([2, 3, 4], dtype=torch.int32)
    """

    choice: Tensor
    """[R] which of the T·k choices a row is for; padding repeats the first."""
    place: Tensor
    """[T·k] row of each choice."""
    ends: Tensor
    """[E] end of each expert's group."""
    is_padding: Tensor | None
    """[R, 1]; None where there is none."""
    per_token: int
    """k"""

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, multiple: int = 1) -> Groups:
        """Of the experts chosen [T, k]; without a look at numbers of the device.

        With `multiple` every group has so many rows or a multiple of it, and none is empty: what
        the grouped products of GPUs like. What is left over belongs to the last group.
        """
        ordered, choice = torch.sort(chosen.flatten(), stable=True)
        device, count = chosen.device, chosen.numel()
        experts = torch.arange(num_experts, device=device)
        ends = torch.searchsorted(ordered, experts, right=True)
        rows = torch.arange(count, device=device)
        is_padding = None
        if multiple > 1:
            sizes = torch.diff(ends, prepend=ends.new_zeros(1))
            padded = ((sizes + multiple - 1) // multiple).clamp(min=1) * multiple
            padded_ends = padded.cumsum(0)
            rows = rows + (padded_ends - padded - ends + sizes)[ordered]
            # As many as there may be at most, whatever was chosen.
            total = (-(-count // multiple) + num_experts) * multiple
            is_padding = torch.ones(total, 1, dtype=torch.bool, device=device)
            is_padding[rows] = False
            choice = choice.new_zeros(total).index_copy(0, rows, choice)
            ends = torch.cat([padded_ends[:-1], padded_ends.new_full((1,), total)])
            place = torch.empty_like(rows).index_copy(0, choice[rows], rows)
        else:
            place = torch.empty_like(rows).index_copy(0, choice, rows)
        return cls(choice, place, ends.to(torch.int32), is_padding, chosen.shape[1])

    def spread(self, tokens: Tensor) -> Tensor:
        """[T, H] → [R, H]: each token's row once for each of its experts."""
        if not len(tokens):
            # Padding has nothing to repeat.
            return torch.cat([tokens, tokens.new_zeros(len(self.choice), tokens.shape[1])])
        return _Spread.apply(tokens, self.choice, self.place, self.per_token)  # type: ignore[no-any-return, no-untyped-call]

    def collect(self, rows: Tensor) -> Tensor:
        """[R, H] → [T, k, H]: what each token's experts say, in the order of its choices."""
        chosen = _Collect.apply(rows, self.choice, self.place, self.is_padding)  # type: ignore[no-untyped-call]
        return chosen.view(-1, self.per_token, rows.shape[1])  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, choice: Tensor, place: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.per_token = per_token
        return tokens.index_select(0, choice // per_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        rows = gradients[0].index_select(0, place)
        return rows.view(-1, ctx.per_token, rows.shape[1]).sum(dim=1), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, choice: Tensor, place: Tensor, is_padding: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(choice, is_padding)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        choice, is_padding = ctx.saved_tensors
        if not len(gradients[0]):
            return gradients[0].new_zeros(len(choice), gradients[0].shape[1]), None, None, None
        rows = gradients[0].index_select(0, choice)
        return rows if is_padding is None else rows.masked_fill(is_padding, 0), None, None, None

"""What the output layer computes from a block of logits on a GPU, compiled into one pass over it.

Uncompiled, forward and backward go over each block of float32 logits 28 times between them, which
takes longer than its products. Shapes: C tokens and W words of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Backend = str | Callable[..., Any]
Function = Callable[..., Any]

LOWEST_LOGPROB = -1e4
"""exp of it is 0; keeps -inf logits out of products with 0."""


class RunningSums(NamedTuple):
    """Of the words so far, [C] each: the largest logit, Σ exp(logit - largest), and
    Σ exp(logit - largest)·(logit - largest)."""

    highest: Tensor
    total: Tensor
    moment: Tensor


def add_block(
    logits: Tensor, bias: Tensor | None, temperatures: Tensor, sums: RunningSums
) -> RunningSums:
    """The sums with one block of `logits` [C, W] before bias [W] and temperatures [C]."""
    logits = (logits if bias is None else logits + bias) / temperatures[:, None]
    highest = torch.maximum(sums.highest, logits.amax(dim=1))
    step = sums.highest - highest
    shrink = step.exp()
    shifted = (logits - highest[:, None]).clamp(min=LOWEST_LOGPROB)
    exponentials = shifted.exp()
    moment = shrink * (sums.moment + sums.total * step) + (exponentials * shifted).sum(dim=1)
    return RunningSums(highest, shrink * sums.total + exponentials.sum(dim=1), moment)


class TokenGradients(NamedTuple):
    """Of the tokens of a block, [C] each."""

    column: Tensor
    """Of the label in this block; below 0 or beyond it where the label is another block's."""
    temperatures: Tensor
    normalisers: Tensor
    entropies: Tensor
    for_logprobs: Tensor
    for_entropies: Tensor | None


def block_gradient(
    logits: Tensor, bias: Tensor | None, of: TokenGradients, dtype: torch.dtype
) -> Tensor:
    """[C, W] gradient by `logits`: d logprob = onehot - p, d entropy = -p·(ln p + H)."""
    logits = (logits if bias is None else logits + bias) / of.temperatures[:, None]
    log_p = (logits - of.normalisers[:, None]).clamp(min=LOWEST_LOGPROB)
    factor = -of.for_logprobs[:, None]
    if of.for_entropies is not None:
        factor = factor - (log_p + of.entropies[:, None]) * of.for_entropies[:, None]
    words = torch.arange(logits.shape[1], device=logits.device)
    own = torch.where(words == of.column[:, None], of.for_logprobs[:, None], 0.0)
    gradient = log_p.exp() * factor + own
    return (gradient / of.temperatures[:, None]).to(dtype)


def add_in_one_pass(
    logits: Tensor,
    bias: Tensor | None,
    of: tuple[Tensor, Tensor],
    sums: RunningSums,
    backend: Backend,
) -> tuple[Tensor, RunningSums]:
    """Logits [C] of the labels, whose columns [C, 1] and temperatures [C] stand in `of`, and the
    sums with this block."""
    column, temperatures = of
    added = _compiled(add_block, backend)(logits, bias, temperatures, sums)
    found = logits.gather(1, column).squeeze(1)
    found = found if bias is None else found + bias[column.squeeze(1)]
    return found / temperatures, RunningSums(*added)


def gradient_in_one_pass(
    logits: Tensor, bias: Tensor | None, of: TokenGradients, dtype: torch.dtype, backend: Backend
) -> Tensor:
    """What `block_gradient` gives."""
    gradient: Tensor = _compiled(block_gradient, backend)(logits, bias, of, dtype)
    return gradient


@cache
def _compiled(function: Function, backend: Backend) -> Function:
    """The function for blocks of any number of tokens and words."""
    return torch.compile(function, dynamic=True, backend=backend)

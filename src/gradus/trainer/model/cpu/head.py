"""Products and exponentials of the output layer in the forms that suit CPUs.

Shapes: N chosen tokens, H hidden size, V vocabulary, C tokens and W words of one block.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_LOG2_E = 1 / math.log(2)


@cache
def has_bfloat16_instructions() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16"))


def float32_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """[C, W]: hidden @ weight.T. Without instructions for 16 bits this is the faster arithmetic."""
    return torch.nn.functional.linear(hidden.float(), weight.float())


def shifted_product(hidden: Tensor, weight: Tensor, likely: Tensor) -> Tensor:
    """[C, W]: hidden @ weight.T in float32, for a CPU that rounds its sums to bfloat16.

    A sum begins at minus the likely logit [C], so that what is rounded is the distance from it:
    small where the probability is not.
    """
    origin = likely.to(torch.bfloat16)[:, None]
    distance = torch.addmm(-origin.expand(-1, weight.shape[0]), hidden, weight.T)
    return distance.float().add_(origin)


def label_products(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, block_tokens: int
) -> Tensor:
    """[N] float32 products of each state with the row of its label, for the shifted form."""
    found = torch.empty(labels.shape, dtype=torch.float32)
    for start in range(0, len(labels), block_tokens):
        tokens = slice(start, start + block_tokens)
        chosen = labels[tokens]
        product = hidden[tokens].float() * weight[chosen].float()
        found[tokens] = product.sum(dim=1)
        if bias is not None:
            found[tokens] += bias[chosen]
    return found


def exp_of_logprobs(log_p: Tensor) -> Tensor:
    """e to the power of logprobs, which are 0 at most.

    torch's exp2 takes a third of the time of its exp here. Rounding the product moves a result by
    x·e^-x of the dtype's precision, at most 0.4 of it.
    """
    return (log_p * _LOG2_E).exp2_()

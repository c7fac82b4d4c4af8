"""A loss turns logprobs and advantages into nats per token; it never divides by a count.

Shapes: T tokens of one micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """What a loss may see of one micro batch; all tensors are [T] on the model's device."""

    policy_logprobs: Tensor
    """Float32, carries gradient. -ln V on tokens that take part in no component."""
    sampling_logprobs: Tensor
    """Float32; 0 on tokens that were not sampled."""
    reference_logprobs: Tensor
    """Float32; 0 where no reference model scored, see `is_scored`."""
    advantages: Tensor
    """Float32."""
    entropies: Tensor
    """Float32, carries gradient; 0 on tokens that take part in no component."""
    mask: Tensor
    """Bool: members of the component. Other tokens may hold anything; use `torch.where`."""
    sample_index: Tensor
    """Int64: which sample of the micro batch the token belongs to, from 0."""
    is_scored: Tensor
    """Bool: tokens that a reference model scored; 0 is a logprob like any other there."""

    def sample_sums(self, values: Tensor) -> Tensor:
        """[T]: each token gets the sum of `values` over the members of its own sample.

        A sample lies in one micro batch as a whole, so this is independent of packing; the sum
        runs in float64, in the order of the tokens. Carries gradient.
        """
        kept = torch.where(self.mask, values, 0.0).double()
        sums = torch.zeros_like(kept).index_add(0, self.sample_index, kept)
        return sums.index_select(0, self.sample_index).to(values.dtype)

    def sample_means(self, values: Tensor) -> Tensor:
        """[T]: like `sample_sums`, divided by the number of members of the sample."""
        counts = self.sample_sums(torch.ones_like(values))
        return self.sample_sums(values) / counts.clamp(min=1.0)


@dataclass(frozen=True)
class LossOutput:
    """What a loss gives back; everything is [T]."""

    per_token: Tensor
    """Nats; 0 outside the mask. step.py multiplies by loss weights and divides by the batch."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Per-token numbers, averaged over the members of the whole batch and recorded as
    `loss/<name>`; the names must be the same in every call, e.g. "dropped_tokens/share"."""


class TokenLoss(Protocol):
    """The loss of the rl component. Built once with the options of the config as keywords."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Nats per token; must be finite and free of NaN gradients outside the mask."""
        ...

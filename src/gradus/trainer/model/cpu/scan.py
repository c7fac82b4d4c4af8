"""The recurrence of Mamba-2 by matrix products over chunks, on CPUs and GPUs alike.

transformers' reference form multiplies out what a product would sum: for a row of 16,384 tokens of
an 8B model it wants hundreds of GiB. In float32 the numbers here are the same up to rounding.

Shapes: B samples, C chunks of Q tokens, G groups of heads, H heads of size P, N the size of a
state. Of each token x [P] goes into its head's state S [P, N], which fades by exp(step · A):
S = S · exp(step · A) + step · x ⊗ b, and y = S c + D · x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus


def chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> Tensor:
    """[B, T, H, P] float32, from inputs of that shape, steps [B, T, H], fading rates [H], what goes
    in and comes out of states [B, T, G, N]; without a state before or after."""
    chunk_size: int = options["chunk_size"]
    D: Tensor = options["D"]
    dt_bias: Tensor = options["dt_bias"]
    samples, length, heads, size = hidden_states.shape
    groups, missing = B.shape[2], -length % chunk_size
    # In the dtype of the steps, as the reference rounds them, and as vLLM seems to on CPUs.
    step = softplus(dt + dt_bias.to(dt.dtype)).clamp(*options.get("dt_limit", (0.0, None)))

    def chunks(tokens: Tensor) -> Tensor:
        """[B, C, ·, Q, ·]; padding goes into no state, for its step is 0."""
        padded = pad(tokens.float(), (*[0, 0] * (tokens.ndim - 2), 0, missing))
        return padded.reshape(samples, -1, chunk_size, *tokens.shape[2:]).transpose(2, 3)

    def by_head(grouped: Tensor) -> Tensor:
        return grouped.repeat_interleave(heads // groups, dim=2)

    x, into, out = chunks(hidden_states), chunks(B), chunks(C)
    steps = chunks(step[..., None])[..., 0]  # [B, C, H, Q]
    # Differences of long sums would lose the last digits of short ones.
    faded = (steps * A[:, None]).double().cumsum(-1)
    going_in = x * steps[..., None]
    # Inside of a chunk: attention without a softmax.
    weights = by_head(out @ into.mT) * _fading(faded)
    inside = weights @ going_in
    # What each chunk leaves, and what it finds: the sum of what those before it left.
    staying = (faded[..., -1:] - faded).float().exp()
    left = (going_in * staying[..., None]).mT @ by_head(into)
    whole = faded[..., -1].transpose(1, 2).cumsum(-1)  # [B, H, C]
    passing = _fading(pad(whole, (1, 0)))[:, :, :-1, 1:]
    found = passing @ left.transpose(1, 2).flatten(3)  # [B, H, C, P·N]
    found = found.reshape(*found.shape[:3], size, -1).transpose(1, 2)
    before = (by_head(out) @ found.mT) * faded.float().exp()[..., None]
    done = (inside + before + x * D[:, None, None]).transpose(2, 3)
    found = done.reshape(samples, -1, heads, size)[:, :length]
    return found.contiguous()


def _fading(logarithms: Tensor) -> Tensor:
    """[..., L, L]: by how much what stands at a column has faded at a row; 0 before it."""
    apart = (logarithms[..., :, None] - logarithms[..., None, :]).float()
    size = apart.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=apart.device).triu(1)
    faded: Tensor = apart.masked_fill(later, float("-inf")).exp()
    return faded

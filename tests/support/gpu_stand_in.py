"""A GPU's code path on a CPU: CUDA's facts, with plain forms of the operations only CUDA has.

Not a mock of a device: the tensors are real and so are the numbers. What differs from a GPU is
the arithmetic inside the two operations, whose calls are checked and counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from gradus.trainer.model.kernels import Attention, BlockSize, DeviceFacts, Platform

HOPPER = DeviceFacts("cuda", capability=(9, 0), has_flash=True, can_compile=True)
"""An H100 with torch alone."""


@dataclass
class DeviceCalls:
    """How often the code asked for what only CUDA has."""

    varlen: int = 0
    widening: int = 0


class _Float32Gpu(Platform):
    """Flash attention that takes float32 too, so that rounding does not hide a difference."""

    def attention(
        self, dtype: torch.dtype, head_size: int, *, is_capped: bool = False
    ) -> Attention:
        taken = torch.bfloat16 if dtype == torch.float32 else dtype
        return super().attention(taken, head_size, is_capped=is_capped)


def stand_in_gpu(
    facts: DeviceFacts = HOPPER, *, block: BlockSize | None = None, takes_float32: bool = False
) -> tuple[Platform, DeviceCalls]:
    """A platform with these facts that computes on the CPU, and its count of calls.

    It compiles without a C compiler. No GPU `takes_float32` in flash attention; a test that
    compares to the last digits says so.

    >>> gpu, calls = stand_in_gpu()
    >>> gpu.facts.kind, calls.varlen
    ('cuda', 0)
    """
    calls = DeviceCalls()

    def varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        calls.varlen += 1
        assert takes_float32 or query.dtype in (torch.bfloat16, torch.float16)
        assert all(t.is_contiguous() for t in (query, key, value))
        assert query.shape[-1] == value.shape[-1]
        found, sums = varlen_with_sums(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            scale=scale,
            window_size=window_size,
            enable_gqa=enable_gqa,
        )
        return found if return_aux is None else (found, sums)

    def widening(left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
        calls.widening += 1
        assert left.dtype == right.dtype
        assert left.dtype in (torch.bfloat16, torch.float16)
        product = left.float() @ right.float()
        return product if into is None else into.add_(product)

    kind = _Float32Gpu if takes_float32 else Platform
    return kind(
        facts,
        varlen=varlen,
        varlen_backward=plain_varlen_backward,
        widening=widening,
        block=block,
        compile_backend="eager",
    ), calls


def plain_varlen(*args: Any, **kwargs: Any) -> Tensor:
    """What torch's documentation says of `varlen_attn`, sample by sample, in float32."""
    return varlen_with_sums(*args, **kwargs)[0]


def varlen_with_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """The same, and the logarithm [H, T] of each query's sum of weights."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    results, sums = [], []
    split = zip((query, key, value), (queries, keys, keys), strict=True)
    for part in zip(*(torch.split(t, lengths) for t, lengths in split), strict=True):
        scores, v = _scores(part, scale, window_size)
        results.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
        sums.append(scores.logsumexp(-1))
    return torch.cat(results), torch.cat(sums, dim=1)


def plain_varlen_backward(
    gradient: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    attended: tuple[Tensor, Tensor],
    starts: tuple[Tensor, Tensor, int, int],
    scale: float,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """As flash attention computes it: weights from the sums, what they share from the result."""
    queries, keys = (it.diff().tolist() for it in starts[:2])
    split = zip(
        (*tokens, attended[0], gradient), (queries, keys, keys, queries, queries), strict=True
    )
    parts = zip(*(torch.split(t, lengths) for t, lengths in split), strict=True)
    found = []
    for part, sums in zip(parts, torch.split(attended[1], queries, dim=1), strict=True):
        leaves = [t.float().requires_grad_() for t in part[:3]]
        with torch.enable_grad():
            scores, v = _scores(leaves, scale, window_size)
        out, back = (t.float().transpose(0, 1) for t in part[3:])
        weights = (scores.detach() - sums[..., None]).exp()
        shared = (out * back).sum(-1, keepdim=True)
        by_scores = weights * (back @ v.detach().mT - shared)
        by_scores = by_scores.masked_fill(scores.isinf(), 0)
        found.append(torch.autograd.grad((scores, v), leaves, (by_scores, weights.mT @ back)))
    query, key, value = (
        torch.cat(t).to(own.dtype) for t, own in zip(zip(*found, strict=True), tokens, strict=True)
    )
    return query, key, value


def _scores(
    part: Sequence[Tensor], scale: float, window_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Of one sample [H, L, S], -inf where a query does not see; and its values [H, S, D]. The last
    query stands beside the last key."""
    q, k, v = (t.transpose(0, 1).float() for t in part)
    k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
    position, (left, right) = torch.arange(q.shape[1]) + k.shape[1] - q.shape[1], window_size
    distance = position[:, None] - torch.arange(k.shape[1])
    is_seen = ((distance >= -right) | (right == -1)) & ((distance <= left) | (left == -1))
    return (q @ k.mT * scale).masked_fill(~is_seen, float("-inf")), v

"""A GPU's code path on a CPU: CUDA's facts, with plain forms of the operations only CUDA has.

Not a mock of a device: the tensors are real and so are the numbers. What differs from a GPU is
the arithmetic inside the two operations, whose calls are checked and counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def attention(self, dtype: torch.dtype, head_size: int) -> Attention:
        return super().attention(torch.bfloat16 if dtype == torch.float32 else dtype, head_size)


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
    ) -> Tensor:
        calls.varlen += 1
        assert takes_float32 or query.dtype in (torch.bfloat16, torch.float16)
        assert all(t.is_contiguous() for t in (query, key, value))
        return plain_varlen(
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
        widening=widening,
        block=block,
        compile_backend="eager",
    ), calls


def plain_varlen(
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
) -> Tensor:
    """What torch's documentation says of `varlen_attn`, sample by sample, in float32."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    results = []
    for part in zip(*(torch.split(t, lengths) for t in (query, key, value)), strict=True):
        q, k, v = (t.transpose(0, 1).float() for t in part)
        k, v = (t.repeat_interleave(len(q) // len(t), dim=0) for t in (k, v))
        position = torch.arange(q.shape[1])
        distance = position[:, None] - position[None]
        is_seen = (distance >= -right) & ((distance <= left) | (left == -1))
        scores = (q @ k.mT * scale).masked_fill(~is_seen, float("-inf"))
        results.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(results)

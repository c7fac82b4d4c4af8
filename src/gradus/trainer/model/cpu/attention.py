"""Exact attention over padded rows, where flash attention does not run: on CPUs, and in float32.

Samples of like length form a block, a rectangle that ordinary kernels take. Shapes: T tokens of the
packed row, R rows of all blocks, B samples of one block, L the longest of them, H query heads, K
key heads, D the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_SHORT_TOKENS = 256
"""In a 16-bit dtype samples up to this length are faster as matrix products over blocks
than in the fused kernel; benchmarks/cpu_attention.py."""
_SHORT_TOKENS_FLOAT32 = 128
"""In float32 the kernel is always faster; longer samples keep all threads busy by themselves."""
_BLOCK_FILL = 0.8
"""A block ends before a sample shorter than this share of its longest."""
_BLOCK_SCORES = 1 << 21
"""Most B·L·L of one block, so that its scores stay near the cache."""


@dataclass(frozen=True)
class AttentionBlock:
    """Samples of like length as rows of one padded rectangle."""

    samples: int
    length: int

    @property
    def num_rows(self) -> int:
        return self.samples * self.length


@dataclass(frozen=True)
class PaddedRows:
    """Where each token of a packed row lies among padded rows, and the way back."""

    blocks: tuple[AttentionBlock, ...]
    to_rows: Tensor
    """[R] token that each padded row shows; padding repeats the first token of its sample."""
    to_tokens: Tensor
    """[T] padded row of each token."""
    is_plain: bool
    """Whether the padded rows are the tokens themselves, in their order."""

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> PaddedRows:
        """The rows of samples of these lengths, laid end to end; blocks suit the dtype."""
        boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        to_tokens = np.empty(int(boundaries[-1]), np.int64)
        to_rows: list[np.ndarray] = []
        blocks: list[AttentionBlock] = []
        start = 0
        for chosen in _blocks_of_like_length(lengths, dtype):
            sizes = np.array([lengths[i] for i in chosen])
            firsts = boundaries[chosen]
            length = int(sizes.max())
            column = np.arange(length)[None, :]
            is_token = column < sizes[:, None]
            shown = np.where(is_token, firsts[:, None] + column, firsts[:, None])
            row = start + np.arange(shown.size).reshape(shown.shape)
            to_tokens[shown[is_token]] = row[is_token]
            to_rows.append(shown.reshape(-1))
            blocks.append(AttentionBlock(len(chosen), length))
            start += shown.size
        rows = np.concatenate(to_rows)
        return cls(
            blocks=tuple(blocks),
            to_rows=torch.from_numpy(rows).to(device),
            to_tokens=torch.from_numpy(to_tokens).to(device),
            is_plain=np.array_equal(rows, np.arange(len(to_tokens))),
        )


def count_padding(lengths: Sequence[int], dtype: torch.dtype) -> int:
    """Rows that hold no token, for samples of these lengths."""
    blocks = _blocks_of_like_length(lengths, dtype)
    return sum(len(chosen) * lengths[chosen[0]] for chosen in blocks) - sum(lengths)


def _blocks_of_like_length(lengths: Sequence[int], dtype: torch.dtype) -> list[list[int]]:
    """Indices of each block's samples, longest first; a long sample is alone in its block."""
    short = _SHORT_TOKENS if dtype.itemsize == 2 else _SHORT_TOKENS_FLOAT32
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    blocks: list[list[int]] = []
    for index in order:
        longest = lengths[blocks[-1][0]] if blocks else 0
        can_share = 0 < longest <= short and lengths[index] >= _BLOCK_FILL * longest
        if can_share and (len(blocks[-1]) + 1) * longest * longest <= _BLOCK_SCORES:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    return blocks


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, padded: PaddedRows, scale: float, window: int | None
) -> Tensor:
    """[T, H, D], from queries [T, H, D] and keys and values [T, K, D]; block by block.

    Padding lies after each sample, so a causal mask keeps every real token from seeing it.
    """
    heads, key_heads = query.shape[1:], key.shape[1]
    sizes = [block.num_rows for block in padded.blocks]
    # Split at once: each slice by itself would have a gradient as large as the whole.
    split = (torch.split(_to_rows(t.flatten(1), padded), sizes) for t in (query, key, value))
    parts = []
    for block, rows_query, rows_key, rows_value in zip(padded.blocks, *split, strict=True):
        block_query = rows_query.view(block.samples, block.length, *heads)
        block_key, block_value = (
            t.view(block.samples, block.length, key_heads, heads[1]) for t in (rows_key, rows_value)
        )
        if _prefers_products(block.length, window, query.dtype):
            attended = _by_products(block_query, block_key, block_value, scale, window)
        else:
            attended = _by_kernel(block_query, block_key, block_value, scale)
        parts.append(attended.reshape(block.num_rows, -1))
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _to_tokens(rows, padded).view(-1, *heads)


def _prefers_products(length: int, window: int | None, dtype: torch.dtype) -> bool:
    """The kernel is faster in float32 and on long samples, but knows no window."""
    if window is not None and window < length:
        return True
    return length <= _SHORT_TOKENS and dtype.itemsize == 2


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Two matrix products and a softmax; [B, L, H, D] and [B, L, K, D] give [B, L, H, D]."""
    samples, length, heads, size = query.shape
    key_heads = key.shape[2]
    shared = heads // key_heads
    query = query.view(samples, length, key_heads, shared, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(samples * key_heads, shared * length, size)
    key = key.permute(0, 2, 3, 1).reshape(samples * key_heads, size, length)
    value = value.transpose(1, 2).reshape(samples * key_heads, length, size)
    forbidden = _forbidden(length, window, query).repeat(shared, 1)
    scores = torch.baddbmm(forbidden, query, key, alpha=scale)
    attended = torch.bmm(torch.softmax(scores, dim=-1), value)
    attended = attended.view(samples, key_heads, shared, length, size).permute(0, 3, 1, 2, 4)
    return attended.reshape(samples, length, heads, size)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """torch's fused causal attention; same shapes as `_by_products`."""
    attended = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2)


def _forbidden(length: int, window: int | None, like: Tensor) -> Tensor:
    """[L, L]: 0 where a query (row) may see a key (column), -inf elsewhere."""
    position = torch.arange(length, device=like.device)
    distance = position[:, None] - position[None, :]
    is_forbidden = distance < 0
    if window is not None:
        is_forbidden |= distance >= window
    zeros = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(is_forbidden, float("-inf"))


def _to_rows(tokens: Tensor, layout: PaddedRows) -> Tensor:
    if layout.is_plain:
        return tokens
    rows: Tensor = _ToRows.apply(tokens, layout)  # type: ignore[no-untyped-call]
    return rows


def _to_tokens(rows: Tensor, layout: PaddedRows) -> Tensor:
    if layout.is_plain:
        return rows
    tokens: Tensor = _ToTokens.apply(rows, layout)  # type: ignore[no-untyped-call]
    return tokens


class _ToRows(torch.autograd.Function):
    """[T, ·] → [R, ·]. Padding rows reach no output, so their gradient is zero and the way back is
    a plain selection instead of a slow scatter-add."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: PaddedRows) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.to_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.layout.to_tokens), None


class _ToTokens(torch.autograd.Function):
    """[R, ·] → [T, ·], dropping padding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: PaddedRows) -> Tensor:
        ctx.layout = layout
        return rows.index_select(0, layout.to_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        layout: PaddedRows = ctx.layout
        rows = gradients[0].new_zeros(layout.to_rows.shape[0], gradients[0].shape[1])
        return rows.index_copy_(0, layout.to_tokens, gradients[0]), None

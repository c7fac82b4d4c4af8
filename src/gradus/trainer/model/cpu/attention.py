"""Exact attention over padded rows, where flash attention does not run: on CPUs, in float32, and
for capped scores.

Samples of like length form a block, a rectangle that ordinary kernels take. Shapes: T tokens of the
packed row, R rows of all blocks, B samples of one block, L the longest of them, H query heads, K
key heads, D the size of a head, V that of its values, which may be smaller.
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
_GPU_BLOCK_SCORES = 1 << 26
"""On a GPU samples of any length share a block up to this, for few large kernels; a head's scores
take 128 MiB then in a 16-bit dtype."""


@dataclass(frozen=True)
class ScoreRule:
    """How a query weighs what it sees."""

    scale: float
    window: int | None = None
    """Tokens back that it sees, itself among them; None means all."""
    cap: float | None = None
    """Scores stay between -cap and cap: cap · tanh(score / cap)."""
    sinks: Tensor | None = None
    """[H] logits of a place that takes weight and gives no value."""

    @property
    def is_plain(self) -> bool:
        """True if flash attention computes it, which knows windows and no more."""
        return self.cap is None and self.sinks is None


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
    """True if the padded rows are the tokens themselves, in their order."""

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> PaddedRows:
        """The rows of samples of these lengths, laid end to end; blocks suit the dtype."""
        boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        to_tokens = np.empty(int(boundaries[-1]), np.int64)
        to_rows: list[np.ndarray] = []
        blocks: list[AttentionBlock] = []
        start = 0
        for chosen in _blocks_of_like_length(lengths, dtype, on_gpu=device.type == "cuda"):
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


def _blocks_of_like_length(
    lengths: Sequence[int], dtype: torch.dtype, *, on_gpu: bool = False
) -> list[list[int]]:
    """Indices of each block's samples, longest first; on a CPU a long sample is alone in its
    block."""
    short = _SHORT_TOKENS if dtype.itemsize == 2 else _SHORT_TOKENS_FLOAT32
    most = _BLOCK_SCORES
    if on_gpu:
        short, most = max(lengths), _GPU_BLOCK_SCORES
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    blocks: list[list[int]] = []
    for index in order:
        longest = lengths[blocks[-1][0]] if blocks else 0
        can_share = 0 < longest <= short and lengths[index] >= _BLOCK_FILL * longest
        if can_share and (len(blocks[-1]) + 1) * longest * longest <= most:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    return blocks


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, padded: PaddedRows, rule: ScoreRule
) -> Tensor:
    """[T, H, V], from queries [T, H, D], keys [T, K, D] and values [T, K, V]; block by block.

    Padding lies after each sample, so a causal mask keeps every real token from seeing it.
    """
    sizes = [block.num_rows for block in padded.blocks]
    # Split at once: each slice by itself would have a gradient as large as the whole.
    split = (torch.split(to_rows(t.flatten(1), padded), sizes) for t in (query, key, value))
    parts = []
    for block, rows_query, rows_key, rows_value in zip(padded.blocks, *split, strict=True):
        shape = (block.samples, block.length)
        tokens = (
            rows_query.view(*shape, *query.shape[1:]),
            rows_key.view(*shape, *key.shape[1:]),
            rows_value.view(*shape, *value.shape[1:]),
        )
        if _prefers_products(block.length, rule, query.dtype):
            attended = _by_products(*tokens, rule)
        else:
            attended = _by_kernel(*tokens, rule.scale)
        parts.append(attended.reshape(block.num_rows, -1))
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return to_tokens(rows, padded).view(-1, query.shape[1], value.shape[2])


def _prefers_products(length: int, rule: ScoreRule, dtype: torch.dtype) -> bool:
    """The kernel is faster in float32 and on long samples, but knows neither windows nor caps."""
    if not rule.is_plain or (rule.window is not None and rule.window < length):
        return True
    return length <= _SHORT_TOKENS and dtype.itemsize == 2


def _by_products(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
    """Two matrix products and a softmax; [B, L, H, D], [B, L, K, D] and [B, L, K, V] give
    [B, L, H, V]."""
    samples, length, heads, size = query.shape
    key_heads = key.shape[2]
    shared = heads // key_heads
    query = query.view(samples, length, key_heads, shared, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(samples * key_heads, shared * length, size)
    key = key.permute(0, 2, 3, 1).reshape(samples * key_heads, size, length)
    value = value.transpose(1, 2).reshape(samples * key_heads, length, -1)
    forbidden = _forbidden(length, rule.window, query).repeat(shared, 1)
    if rule.cap is None:
        scores = torch.baddbmm(forbidden, query, key, alpha=rule.scale)
    else:
        scores = torch.bmm(query, key).mul(rule.scale / rule.cap).tanh().mul(rule.cap) + forbidden
    weights = _weights(scores, rule.sinks, samples)
    attended = torch.bmm(weights, value)
    attended = attended.view(samples, key_heads, shared, length, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(samples, length, heads, -1)


def _weights(scores: Tensor, sinks: Tensor | None, samples: int) -> Tensor:
    """Softmax of scores [B·K, H / K · L, L]; a sink stands among them as one more column."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    rows, length = scores.shape[1:]
    column = sinks.to(scores.dtype).repeat_interleave(length).view(1, -1, rows, 1)
    column = column.expand(samples, -1, -1, -1).reshape(-1, rows, 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """torch's fused causal attention; same shapes as `_by_products`.

    It wants values as wide as keys: zeros behind them change nothing and are cut off again.
    """
    size = value.shape[-1]
    attended = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        widened(value, key.shape[-1]).transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended[..., :size].transpose(1, 2)


def widened(value: Tensor, size: int) -> Tensor:
    """[..., V] values with zeros behind them up to `size`."""
    missing = size - value.shape[-1]
    return torch.nn.functional.pad(value, (0, missing)) if missing else value


def _forbidden(length: int, window: int | None, like: Tensor) -> Tensor:
    """[L, L]: 0 where a query (row) may see a key (column), -inf elsewhere."""
    position = torch.arange(length, device=like.device)
    distance = position[:, None] - position[None, :]
    is_forbidden = distance < 0
    if window is not None:
        is_forbidden |= distance >= window
    zeros = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(is_forbidden, float("-inf"))


def to_rows(tokens: Tensor, layout: PaddedRows) -> Tensor:
    """[R, ·], from [T, ·]."""
    if layout.is_plain:
        return tokens
    rows: Tensor = _ToRows.apply(tokens, layout)  # type: ignore[no-untyped-call]
    return rows


def to_tokens(rows: Tensor, layout: PaddedRows) -> Tensor:
    """[T, ·], from [R, ·]."""
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

"""Exact attention inside each sample of a packed row, for any transformers model.

Shapes: T tokens of the row, B samples of one block, L the longest of them, H query heads, K key
heads, D the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gradus.errors import ConfigError
from gradus.trainer.distributed import ContextGroup
from gradus.trainer.model.context_parallel import copy_key_heads, gather_heads, scatter_heads
from gradus.trainer.model.gpu.flash import has_flash_attention

ATTENTION_NAME = "gradus_packed"
"""Name under which transformers finds `packed_attention`."""

_SHORT_TOKENS = 256
"""In a 16-bit dtype samples up to this length are faster on a CPU as matrix products over blocks
than in the fused kernel; benchmarks/cpu_attention.py."""
_SHORT_TOKENS_FLOAT32 = 128
"""In float32 the kernel is always faster; longer samples keep all threads busy by themselves."""
_BLOCK_FILL = 0.8
"""A block ends before a sample shorter than this share of its longest."""
_BLOCK_SCORES = 1 << 21
"""Most B·L·L of one block, so that its scores stay near the cache."""
_LARGEST_HEAD = 256
"""Flash attention knows heads up to this size, in steps of 8."""


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
        for chosen in _blocks_of_like_length(lengths, _short_tokens(dtype)):
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


@dataclass(frozen=True)
class PackedLayout:
    """Where the samples of a packed row begin and end."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    """[samples + 1] int32 starts of the samples, and T."""
    context: ContextGroup | None = None
    """The ranks that share the tokens of this row; None when it is whole on each rank."""

    @classmethod
    def build(
        cls, lengths: Sequence[int], device: torch.device, context: ContextGroup | None = None
    ) -> PackedLayout:
        """The layout of samples of these lengths, laid end to end."""
        boundaries = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(tuple(lengths), torch.from_numpy(boundaries).to(device), context)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def _rows(self) -> dict[torch.dtype, PaddedRows]:
        return {}

    def rows(self, dtype: torch.dtype) -> PaddedRows:
        """The same for all layers; only kernels that want rectangles need it."""
        if dtype not in self._rows:
            self._rows[dtype] = PaddedRows.build(self.lengths, self.boundaries.device, dtype)
        return self._rows[dtype]

    def shared(self, padding: int, context: ContextGroup) -> PackedLayout:
        """The same row, shared by ranks, with `padding` tokens as a last sample."""
        lengths = (*self.lengths, padding) if padding else self.lengths
        return PackedLayout.build(lengths, self.boundaries.device, context)


def padded_tokens(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> int:
    """Padding rows that attention computes for samples of these lengths; none with `varlen`."""
    if _has_varlen(device, dtype):
        return 0
    blocks = _blocks_of_like_length(lengths, _short_tokens(dtype))
    return sum(len(chosen) * lengths[chosen[0]] for chosen in blocks) - sum(lengths)


class _Tokens(NamedTuple):
    """Queries [T, H, D], keys and values [T, K, D] of a packed row."""

    query: Tensor
    key: Tensor
    value: Tensor


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of [1, H, T, D] queries inside each sample; gives [1, T, H, D].

    transformers calls this with the model's keyword arguments, `packed_layout` among them.
    """
    assert attention_mask is None, "packed rows carry no mask"
    for refused in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(refused) is not None:
            raise ConfigError(
                f"{type(module).__name__} needs attention with {refused!r}, which packed training "
                "does not compute; use another model"
            )
    layout: PackedLayout = kwargs["packed_layout"]
    if "sliding_window" not in kwargs:
        _refuse_hidden_window(module, layout)
    scale = float(kwargs.get("scaling") or query.shape[-1] ** -0.5)
    window = kwargs.get("sliding_window")
    tokens = _Tokens(*(t[0].transpose(0, 1) for t in (query, key, value)))
    can_flash = _has_varlen(query.device, query.dtype) and _fits_flash(query.shape[-1])
    kernel = _varlen if can_flash else _padded
    group = layout.context
    if group is None:
        return kernel(tokens, layout, scale, window)[None], None
    attended = kernel(_own_heads(tokens, group), layout, scale, window)
    return gather_heads(attended, group)[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _refuse_hidden_window(module: torch.nn.Module, layout: PackedLayout) -> None:
    """Some models keep their window to the mask, which packed rows do not have."""
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    # 0 in a config stands for none.
    if window and window < layout.longest:
        raise ConfigError(
            f"{type(module).__name__} keeps a sliding window of {window} tokens to its mask, so a "
            f"packed sample of {layout.longest} would see too much; lower model.max_length_tokens "
            f"to {window} or less"
        )


def keep_from_compiler() -> None:
    """Let torch.compile leave attention alone: rows differ from micro batch to micro batch, and
    its kernels are fused already. Imports the compiler, so only those who compile call it."""
    uncompiled = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION_NAME, uncompiled)


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and has_flash_attention(device)


def _fits_flash(head_size: int) -> bool:
    return head_size <= _LARGEST_HEAD and head_size % 8 == 0


def _own_heads(tokens: _Tokens, group: ContextGroup) -> _Tokens:
    """All tokens, but only this rank's heads; one transfer for queries, keys and values."""
    key, value = copy_key_heads(tokens.key, group), copy_key_heads(tokens.value, group)
    parts = (tokens.query, key, value)
    by_rank = [t.reshape(len(t), group.size, -1, t.shape[2]) for t in parts]
    mixed = torch.cat(by_rank, dim=2).flatten(1, 2)
    heads = [t.shape[2] for t in by_rank]
    return _Tokens(*torch.split(scatter_heads(mixed, group), heads, dim=1))


def _short_tokens(dtype: torch.dtype) -> int:
    return _SHORT_TOKENS if dtype.itemsize == 2 else _SHORT_TOKENS_FLOAT32


def _blocks_of_like_length(lengths: Sequence[int], short: int) -> list[list[int]]:
    """Indices of each block's samples, longest first; a long sample is a block of its own."""
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


def _varlen(tokens: _Tokens, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    """The GPU kernel for samples of different lengths; [T, H, D], no padding at all."""
    attended = varlen_attn(
        tokens.query.contiguous(),
        tokens.key.contiguous(),
        tokens.value.contiguous(),
        layout.boundaries,
        layout.boundaries,
        layout.longest,
        layout.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=tokens.query.shape[1] != tokens.key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def _padded(tokens: _Tokens, layout: PackedLayout, scale: float, window: int | None) -> Tensor:
    """Attention block by block over padded rows; padding lies after each sample, so a causal mask
    keeps every real token from seeing it."""
    heads, key_heads = tokens.query.shape[1:], tokens.key.shape[1]
    padded = layout.rows(tokens.query.dtype)
    sizes = [block.num_rows for block in padded.blocks]
    # Split at once: each slice by itself would have a gradient as large as the whole.
    split = (torch.split(_to_rows(t.flatten(1), padded), sizes) for t in tokens)
    parts = []
    for block, query, key, value in zip(padded.blocks, *split, strict=True):
        block_query = query.view(block.samples, block.length, *heads)
        block_key, block_value = (
            t.view(block.samples, block.length, key_heads, heads[1]) for t in (key, value)
        )
        if _prefers_products(block.length, window, tokens.query.dtype):
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

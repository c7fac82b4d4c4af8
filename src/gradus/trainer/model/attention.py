"""Exact attention inside each sample of a packed row, for any transformers model.

`gpu/flash.py` computes it where that runs, `cpu/attention.py` everywhere else; `kernels.py`
decides. Shapes: T tokens of the row, H query heads, K key heads, D the size of a head, V that of
its values, which latent attention makes smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from gradus.errors import ConfigError
from gradus.trainer.distributed import ContextGroup
from gradus.trainer.model.context.parts import (
    ContextPart,
    gather_heads,
    own_heads,
    own_part,
)
from gradus.trainer.model.context.ring import Ring, ring_attention
from gradus.trainer.model.cpu.attention import PaddedRows, ScoreRule, padded_attention, widened
from gradus.trainer.model.cpu.blocks import BlockKernel, ProductBlocks
from gradus.trainer.model.gpu.flash import VarlenBlocks, flash_attention
from gradus.trainer.model.kernels import Platform

ATTENTION_NAME = "gradus_packed"
"""Name under which transformers finds `packed_attention`."""


@dataclass(frozen=True)
class PackedLayout:
    """Where the samples of a packed row begin and end."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    """[samples + 1] int32 starts of the samples, and T."""
    context: ContextGroup | None = None
    """The ranks that share the tokens of this row; None when it is whole on each rank."""
    platform: Platform | None = None
    """Whose kernel attends; None means the device's own."""
    ring: Ring | None = None
    """Where keys travel among those ranks."""

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        context: ContextGroup | None = None,
        *,
        is_pinned: bool = False,
    ) -> PackedLayout:
        """The layout of samples of these lengths, laid end to end."""
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        boundaries = torch.from_numpy(starts)
        boundaries = boundaries.pin_memory() if is_pinned else boundaries
        return cls(tuple(lengths), boundaries.to(device, non_blocking=is_pinned), context)

    def on(self, device: torch.device) -> PackedLayout:
        """The same layout there; pinned memory is copied without waiting for it."""
        if device == self.boundaries.device:
            return self
        return replace(self, boundaries=self.boundaries.to(device, non_blocking=True))

    @cached_property
    def _cut(self) -> dict[int, PackedLayout]:
        return {}

    def in_chunks(self, size: int) -> PackedLayout:
        """The same row with each sample cut into samples of at most `size` tokens."""
        assert self.ring is None, "a ring of chunks is refused before"
        if self.longest <= size:
            return self
        if size not in self._cut:
            lengths = [min(size, it - start) for it in self.lengths for start in range(0, it, size)]
            cut = PackedLayout.build(lengths, self.boundaries.device, self.context)
            self._cut[size] = replace(cut, platform=self.platform)
        return self._cut[size]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def _rows(self) -> dict[torch.dtype, PaddedRows]:
        return {}

    def rows(self, dtype: torch.dtype) -> PaddedRows:
        """The same for all layers; only kernels that want rectangles need it."""
        if dtype not in self._rows:
            lengths = self.lengths if self.ring is None else self.ring.lengths
            self._rows[dtype] = PaddedRows.build(lengths, self.boundaries.device, dtype)
        return self._rows[dtype]

    def own_heads(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Whole samples [T, H / ranks, ...] of this rank's heads, of tensors [P, H, ...]."""
        if self.context is None:
            return list(tokens)
        found = own_heads(tokens, self.context)
        if self.ring is None:
            return found
        return [tensor.index_select(0, self.ring.places) for tensor in found]

    def all_heads(self, tokens: Tensor) -> Tensor:
        """[P, H, ...]: the way back."""
        if self.context is None:
            return tokens
        if self.ring is not None:
            padded = torch.cat([tokens, torch.zeros_like(tokens[:1])])
            tokens = padded.index_select(0, self.ring.tokens)
        return gather_heads(tokens, self.context)

    def own_part(self, per_head: Tensor) -> Tensor:
        """[H / ranks, ...] of a parameter [H, ...]."""
        return per_head if self.context is None else own_part(per_head, self.context)

    def shared(self, part: ContextPart) -> PackedLayout:
        """The same row, of which this rank has a part."""
        device, group = self.boundaries.device, part.group
        ring = Ring(self.lengths, group, device) if group.is_ring else None
        layout = PackedLayout.build(part.lengths, device, group)
        return replace(layout, platform=self.platform, ring=ring)


class _Tokens(NamedTuple):
    """Queries [T, H, D], keys [T, K, D] and values [T, K, V] of a packed row."""

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
    """Causal attention of [1, H, T, D] queries inside each sample; gives [1, T, H, V].

    transformers calls this with the model's keyword arguments, `packed_layout` among them.
    """
    assert attention_mask is None, "packed rows carry no mask"
    if kwargs.get("position_bias") is not None:
        raise ConfigError(
            f"{type(module).__name__} needs attention with 'position_bias', which packed training "
            "does not compute; use another model"
        )
    layout: PackedLayout = kwargs["packed_layout"]
    if (chunk := getattr(module, "chunk_tokens", None)) is not None:
        layout = layout.in_chunks(chunk)
    if "sliding_window" not in kwargs:
        _refuse_hidden_window(module, layout)
    rule = ScoreRule(
        scale=float(kwargs.get("scaling") or query.shape[-1] ** -0.5),
        window=kwargs.get("sliding_window"),
        cap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    tokens = _Tokens(*(t[0].transpose(0, 1) for t in (query, key, value)))
    group = layout.context
    if group is None:
        return _attend(tokens, layout, rule)[None], None
    if layout.ring is not None:
        return _attend_in_ring(tokens, layout, layout.ring, rule)[None], None
    own = replace(rule, sinks=None if rule.sinks is None else own_part(rule.sinks, group))
    attended = _attend(_Tokens(*own_heads(tokens, group)), layout, own)
    return gather_heads(attended, group)[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _refuse_hidden_window(module: torch.nn.Module, layout: PackedLayout) -> None:
    """Some models put their window into the mask only, which packed rows do not have."""
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    longest = layout.longest if layout.ring is None else max(layout.ring.lengths)
    # Some configs write 0 for no window.
    if window and window < longest:
        raise ConfigError(
            f"{type(module).__name__} keeps a sliding window of {window} tokens to its mask, so a "
            f"packed sample of {longest} would see too much; lower model.max_length_tokens "
            f"to {window} or less"
        )


def keep_from_compiler() -> None:
    """Let torch.compile leave attention alone: rows differ from micro batch to micro batch, and
    its kernels are fused already. Imports the compiler, so only those who compile call it."""
    uncompiled = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION_NAME, uncompiled)


def _attend(tokens: _Tokens, layout: PackedLayout, rule: ScoreRule) -> Tensor:
    platform, is_varlen = _kernel(tokens.query, layout, rule)
    if is_varlen:
        return flash_attention(tokens, layout.boundaries, layout.longest, rule, platform)
    return padded_attention(*tokens, layout.rows(tokens.query.dtype), rule)


def _attend_in_ring(tokens: _Tokens, layout: PackedLayout, ring: Ring, rule: ScoreRule) -> Tensor:
    platform, is_varlen = _kernel(tokens.query, layout, rule)
    size = tokens.value.shape[-1]
    kernel: BlockKernel = ProductBlocks(rule.scale, rule.cap)
    if is_varlen:
        kernel = VarlenBlocks(rule.scale, platform)
        tokens = tokens._replace(value=widened(tokens.value, tokens.key.shape[-1]))
    return ring_attention(tokens, ring, kernel, rule.sinks, window=rule.window)[..., :size]


def _kernel(query: Tensor, layout: PackedLayout, rule: ScoreRule) -> tuple[Platform, bool]:
    """Where attention runs, and whether by the kernel for samples of different lengths."""
    platform = layout.platform or Platform.of(query.device)
    is_capped = rule.cap is not None
    kind = platform.attention(query.dtype, query.shape[-1], is_capped=is_capped)
    return platform, kind == "varlen"

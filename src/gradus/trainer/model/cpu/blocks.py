"""Attention of blocks of queries to blocks of keys, by matrix products in float32.

A block's result is a part of a softmax: the sums of its weights come with it, so that the results
of several blocks can be merged, and its gradients are those of the whole.

Shapes: Q queries and S keys of all blocks, H query heads, K key heads, D the size of a head, V that
of its values; B blocks that are alike, of q queries and s keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Queries and keys laid end to end; the queries of each block see keys of the same block."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    device: torch.device
    is_causal: bool = False
    """True if the last query sees all keys of its block, the one before it one less; else every
    query sees all of them."""
    window: int | None = None
    """How many of these keys a query sees at most, the last ones; only of causal blocks."""

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor]:
        """[blocks + 1] int32 of queries, and of keys."""
        query, key = (
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=self.device)
            for sizes in (self.queries, self.keys)
        )
        return query, key

    @cached_property
    def alike(self) -> list[_Alike]:
        """Blocks of one shape together."""
        found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        first_query = first_key = 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            found[queries, keys].append((first_query, first_key))
            first_query, first_key = first_query + queries, first_key + keys
        return [self._alike(shape, firsts) for shape, firsts in found.items()]

    def _alike(self, shape: tuple[int, int], firsts: Sequence[tuple[int, int]]) -> _Alike:
        begins = torch.tensor(firsts, device=self.device)
        queries, keys = (torch.arange(size, device=self.device) for size in shape)
        hidden = None
        if self.is_causal:
            behind = queries[:, None] + (shape[1] - shape[0]) - keys
            hidden = behind < 0
            if self.window is not None:
                hidden |= behind >= self.window
        return _Alike(begins[:, :1] + queries, begins[:, 1:] + keys, hidden)


class _Alike(NamedTuple):
    queries: Tensor
    """[B, q]"""
    keys: Tensor
    """[B, s]"""
    hidden: Tensor | None
    """[q, s]"""


class BlockKernel(Protocol):
    """What computes blocks: on CPUs, on GPUs."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor]:
        """[Q, H, V], and in float32 the logarithms [H, Q] of what weights were divided by."""

    def backward(
        self,
        gradient: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        blocks: Blocks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values from that of the merged result [Q, H, V]; this and
        its logarithms [H, Q] are `attended`."""


@dataclass(frozen=True)
class ProductBlocks:
    """Holds the scores of blocks that are alike."""

    scale: float
    cap: float | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor]:
        heads, key_heads = query.shape[1], key.shape[1]
        attended = query.new_empty(*query.shape[:2], value.shape[2])
        sums = query.new_empty(heads, len(query), dtype=torch.float32)
        for part in blocks.alike:
            scores = self._scores(query, key, part)[0]
            sum_ = scores.logsumexp(-1, keepdim=True)
            found = (scores - sum_).exp() @ _by_key_head(value[part.keys], key_heads)
            attended[part.queries] = _by_token(found, heads, part.queries).to(attended.dtype)
            sums[:, part.queries] = _by_token(sum_, heads, part.queries)[..., 0].permute(2, 0, 1)
        return attended, sums

    def backward(
        self,
        gradient: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        blocks: Blocks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = tokens
        merged, sums = attended
        heads, key_heads = query.shape[1], key.shape[1]
        found = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        for part in blocks.alike:
            scores, slope = self._scores(query, key, part)
            sum_ = _by_key_head(sums[:, part.queries].permute(1, 2, 0)[..., None], key_heads)
            back, out = (_by_key_head(it[part.queries], key_heads) for it in (gradient, merged))
            weights = (scores - sum_).exp()
            wide = _by_key_head(value[part.keys], key_heads)
            by_scores = weights * (back @ wide.mT - (back * out).sum(-1, keepdim=True))
            by_scores = by_scores * self.scale if slope is None else by_scores * slope
            q = _by_key_head(query[part.queries], key_heads)
            k = _by_key_head(key[part.keys], key_heads)
            by_query = _by_token(by_scores @ k, heads, part.queries)
            found[0][part.queries] = by_query.to(query.dtype)
            for own, it in zip(found[1:], (by_scores.mT @ q, weights.mT @ back), strict=True):
                own[part.keys] = _by_token(it, key_heads, part.keys).to(own.dtype)
        return found

    def _scores(self, query: Tensor, key: Tensor, part: _Alike) -> tuple[Tensor, Tensor | None]:
        """[B · K, H / K · q, s], -inf where a query does not see; and by what products grow into
        capped ones."""
        key_heads = key.shape[1]
        q, k = _by_key_head(query[part.queries], key_heads), _by_key_head(key[part.keys], key_heads)
        scores, slope = (q @ k.mT) * self.scale, None
        if self.cap is not None:
            bent = (scores / self.cap).tanh()
            scores, slope = bent * self.cap, (1 - bent.square()) * self.scale
        if part.hidden is not None:
            hidden = part.hidden.repeat(query.shape[1] // key_heads, 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores, slope


def _by_key_head(tokens: Tensor, key_heads: int) -> Tensor:
    """[B, l, H, ·] → [B · K, H / K · l, ·] in float32."""
    samples, length, heads, size = tokens.shape
    grouped = tokens.float().view(samples, length, key_heads, heads // key_heads, size)
    return grouped.permute(0, 2, 3, 1, 4).reshape(samples * key_heads, -1, size)


def _by_token(rows: Tensor, heads: int, like: Tensor) -> Tensor:
    """[B · K, H / K · l, ·] → [B, l, H, ·], for places [B, l]."""
    samples, length = like.shape
    return rows.view(samples, heads, length, -1).transpose(1, 2)

"""Attention that ranks share by tokens: keys and values travel around a ring of ranks.

Ring attention (arXiv 2310.01889) in zigzag order: with each part of the keys that comes by, a rank
attends from those of its queries that see it, and merges the results by the sums of their weights.
Backward is a second round, in which the gradients of keys and values travel with them. Any number
of heads will do. Windows reach few keys: those are fetched from all ranks at once.

Shapes: P tokens of this rank, H query heads, K key heads, D the size of a head, V that of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from gradus.trainer.distributed import ContextGroup, named_failures
from gradus.trainer.model.context.parts import piece_length, zigzag
from gradus.trainer.model.cpu.blocks import BlockKernel, Blocks


class _Step(NamedTuple):
    """Which rows attend to which of the keys that are here, and how."""

    queries: Tensor | slice
    keys: Tensor | slice
    blocks: Blocks


class _Round(NamedTuple):
    """The steps that merge to one result: one, or as many as there are ranks in the ring."""

    steps: tuple[_Step, ...]
    kernel: BlockKernel
    group: ContextGroup


_ALL = slice(None)


@dataclass(frozen=True)
class Ring:
    """How the samples of a row lie on the ranks of a ring."""

    lengths: tuple[int, ...]
    """Of the whole samples."""
    group: ContextGroup
    device: torch.device

    @cached_property
    def steps(self) -> tuple[_Step, ...]:
        """What is done with the keys of this rank, of the one before it, and so on around."""
        pieces = self._pieces
        pairs = tuple(2 * it for it in pieces)
        is_late = np.concatenate([np.arange(2 * it) >= it for it in pieces])
        early, late = (
            torch.from_numpy(np.flatnonzero(it)).to(self.device) for it in (~is_late, is_late)
        )
        own = _Step(_ALL, _ALL, Blocks(pairs, pairs, self.device, is_causal=True))
        before = _Step(_ALL, early, Blocks(pairs, pieces, self.device))
        behind = _Step(late, _ALL, Blocks(pieces, pairs, self.device))
        rank, size = self.group.rank, self.group.size
        return (own, *(before if step <= rank else behind for step in range(1, size)))

    @cached_property
    def _reaching(self) -> dict[int, tuple[Tensor, _Step]]:
        return {}

    def reaching(self, window: int) -> tuple[Tensor, _Step]:
        """Which keys of all ranks, laid end to end, this rank's queries see, and how."""
        known = self._reaching
        if window not in known:
            known[window] = self._reach(window)
        return known[window]

    def _reach(self, window: int) -> tuple[Tensor, _Step]:
        size, rank = self.group.size, self.group.rank
        share, first = 2 * sum(self._pieces), 0
        keys, queries, seen = [], [], []
        for piece in self._pieces:
            for number in (rank, 2 * size - 1 - rank):
                begin, end = number * piece, (number + 1) * piece
                low = max(0, begin - window + 1)
                place = np.arange(low, end)
                of_piece = place // piece
                is_early = of_piece < size
                owner = np.where(is_early, of_piece, 2 * size - 1 - of_piece)
                inside = first + np.where(is_early, 0, piece) + place % piece
                keys.append(owner * share + inside)
                queries.append(end - begin)
                seen.append(end - low)
            first += 2 * piece
        blocks = Blocks(tuple(queries), tuple(seen), self.device, is_causal=True, window=window)
        return torch.from_numpy(np.concatenate(keys)).to(self.device), _Step(_ALL, _ALL, blocks)

    @cached_property
    def tokens(self) -> Tensor:
        """Which token of the row lies at each place of all ranks, laid end to end; the number of
        tokens for padding."""
        ranks = (replace(self.group, rank=rank) for rank in range(self.group.size))
        places = [piece for rank in ranks for piece in zigzag(self.lengths, rank)]
        return torch.from_numpy(np.concatenate(places)).to(self.device)

    @cached_property
    def places(self) -> Tensor:
        """Where each token of the row lies among those."""
        return self.tokens.argsort(stable=True)[: sum(self.lengths)]

    @cached_property
    def _pieces(self) -> tuple[int, ...]:
        return tuple(piece_length(it, self.group.size) for it in self.lengths)


def ring_attention(
    tokens: tuple[Tensor, Tensor, Tensor],
    ring: Ring,
    kernel: BlockKernel,
    sinks: Tensor | None,
    *,
    window: int | None = None,
) -> Tensor:
    """[P, H, V], from queries [P, H, D], keys [P, K, D] and values [P, K, V] of this rank."""
    query, key, value = tokens
    if window is None or window >= max(ring.lengths):
        found: Tensor = _Merged.apply(*tokens, sinks, _Round(ring.steps, kernel, ring.group))  # type: ignore[no-untyped-call]
        return found
    wanted, step = ring.reaching(window)
    pair = torch.cat([key, value], dim=-1)
    everywhere = pair.expand(ring.group.size, *pair.shape).flatten(0, 1).contiguous()
    whole = all_to_all_single(everywhere, None, None, ring.group.group)
    seen = _apart(whole.index_select(0, wanted), key, value)
    reached: Tensor = _Merged.apply(query, *seen, sinks, _Round((step,), kernel, ring.group))  # type: ignore[no-untyped-call]
    return reached


class _Merged(torch.autograd.Function):
    """Attention over the keys of all steps.

    A sink takes weight and gives no value: in the end it makes the sums larger.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        round_: _Round,
    ) -> Tensor:
        steps, kernel, group = round_
        held = torch.cat([key, value], dim=-1)
        for number, step in enumerate(steps):
            arriving = None if number + 1 == len(steps) else _pass_on(held, group)
            keys, values = _apart(held[step.keys], key, value)
            attended, found = kernel.forward(query[step.queries], keys, values, step.blocks)
            if number == 0:
                merged, sums = attended.float(), found
            else:
                _merge(merged, sums, attended, found, step.queries)
            held = held if arriving is None else arriving()
        if sinks is not None:
            larger = torch.logaddexp(sums, sinks.float()[:, None])
            merged, sums = merged * _by_row(sums - larger), larger
        result = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, sums)
        ctx.round = round_
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, sums = ctx.saved_tensors
        steps, kernel, group = ctx.round
        held = torch.cat([key, value], dim=-1)
        by_query = torch.zeros_like(query, dtype=torch.float32)
        by_held = torch.zeros_like(held, dtype=torch.float32)
        returning: Callable[[], Tensor] | None = None
        for number, step in enumerate(steps):
            is_last = number + 1 == len(steps)
            arriving = None if is_last else _pass_on(held, group)
            keys, values = _apart(held[step.keys], key, value)
            rows = step.queries
            found = kernel.backward(
                gradients[0][rows],
                (query[rows], keys, values),
                (result[rows], sums[:, rows]),
                step.blocks,
            )
            by_query[rows] += found[0]
            if returning is not None:
                by_held = returning()
            by_held[step.keys] += torch.cat(found[1:], dim=-1)
            held = held if arriving is None else arriving()
            returning = None if len(steps) == 1 else _pass_on(by_held, group)
        by_held = by_held if returning is None else returning()
        by_key, by_value = (it.to(key.dtype) for it in _apart(by_held, key, value))
        by_sinks = None
        if sinks is not None:
            taken = (sinks.float()[:, None] - sums).exp()
            lost = (gradients[0].float() * result.float()).sum(-1).T
            by_sinks = -(taken * lost).sum(1).to(sinks.dtype)
        return by_query.to(query.dtype), by_key, by_value, by_sinks, None


def _apart(pair: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that lie in one tensor, as wide as these."""
    keys, values = torch.split(pair, [key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values


def _merge(
    merged: Tensor, sums: Tensor, attended: Tensor, found: Tensor, rows: Tensor | slice
) -> None:
    """Add to a softmax over some keys that over others, in place."""
    before = sums[:, rows]
    after = torch.logaddexp(before, found)
    both = merged[rows] * _by_row(before - after) + attended * _by_row(found - after)
    merged[rows], sums[:, rows] = both, after


def _by_row(logarithms: Tensor) -> Tensor:
    """[H, Q] → factors [Q, H, 1]."""
    return logarithms.exp().T[..., None]


def _pass_on(tensor: Tensor, group: ContextGroup) -> Callable[[], Tensor]:
    """Send this rank's tensor to the next one; waits for that of the one before when called."""
    sent, arriving = tensor.contiguous(), torch.empty_like(tensor)
    rank, size = group.rank, group.size
    with named_failures("pass keys around the ring of context-parallel ranks"):
        pending = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group.group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, arriving, group=group.group, group_peer=(rank - 1) % size),
            ]
        )

    def wait() -> Tensor:
        with named_failures("pass keys around the ring of context-parallel ranks"):
            for it in pending:
                it.wait()
        return arriving

    return wait

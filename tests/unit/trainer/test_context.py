"""Ranks that share the tokens of a row compute what one rank computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_stand_in import HOPPER, stand_in_gpu

from gradus.trainer.distributed import ContextGroup
from gradus.trainer.model.context.parts import ContextPart, count_ring_padding
from gradus.trainer.model.context.ring import Ring, ring_attention
from gradus.trainer.model.cpu.blocks import Blocks, ProductBlocks
from gradus.trainer.model.gpu.flash import VarlenBlocks
from gradus.trainer.model.kernels import Platform

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parents[2] / "support" / "context_ranks.py"
CPU = torch.device("cpu")


def group(rank: int, size: int, *, is_ring: bool = True) -> ContextGroup:
    return ContextGroup(rank, size, None, is_ring)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_ranks", "style", "cases"),
    [
        (2, "ring", ["gemma2 with caps+adapters", "mamba2+full", "qwen3_5+selective"]),
        (2, "heads", ["kimi_linear+full+adapters", "nemotron_h without experts+selective"]),
        (3, "ring", ["gpt_oss+gpu+full"]),
        (4, "heads", ["falcon_h1+adapters", "qwen3_5 with two key heads", "lfm2"]),
    ],
)
def test_ranks_of_a_context_give_the_logprobs_and_gradients_of_one(
    run_ranks: Callable[..., str], num_ranks: int, style: str, cases: list[str]
) -> None:
    """Samples of 1, 2, 63, 64, 65 and 300 tokens in one row."""
    written = run_ranks(PROGRAM, style, *cases, num_ranks=num_ranks)
    found = [json.loads(line) for line in written.splitlines() if line.startswith('{"case"')]
    assert [it["case"] for it in found] == cases
    for it in found:
        assert "error" not in it, it
        assert it["logprobs"] <= 2e-6, it
        assert it["gradient"] <= 2e-6, it


@pytest.mark.parametrize("is_ring", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_token_is_of_one_rank_and_all_ranks_have_as_many(size: int, is_ring: bool) -> None:
    lengths = (1, 2, 63, 64, 65, 300)
    parts = [
        ContextPart.of(lengths, CPU, group(rank, size, is_ring=is_ring)) for rank in range(size)
    ]
    assert len({len(it.tokens) for it in parts}) == 1
    tokens = torch.cat([it.tokens for it in parts])
    real = tokens[tokens < sum(lengths)]
    assert real.sort().values.tolist() == [*range(sum(lengths))]
    padding = count_ring_padding(lengths, size) if is_ring else -sum(lengths) % size
    assert len(tokens) - len(real) == padding


def test_a_part_finds_its_targets_and_fills_up_with_what_it_is_told() -> None:
    part = ContextPart.of((3, 5), CPU, group(1, 2))
    assert part.tokens.tolist() == [1, 2, 5, 6, 7, 8]
    mine, places = part.own_targets(torch.tensor([0, 2, 4, 6, 7]))
    assert (mine.tolist(), places.tolist()) == ([1, 3, 4], [1, 3, 4])
    assert part.own(torch.arange(8), padding=-2).tolist() == [1, 2, 5, 6, 7, -2]


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 3])
def test_blocks_are_those_of_a_softmax_and_both_kernels_agree(
    cap: float | None, window: int | None
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, heads, 8) for n, heads in ((9, 4), (14, 2), (14, 2)))
    blocks = Blocks((4, 1, 4), (6, 2, 6), CPU, is_causal=True, window=window)
    kernel = ProductBlocks(0.3, cap)
    found, sums = kernel.forward(query, key, value, blocks)
    leaves = [it.clone().requires_grad_() for it in (query, key, value)]
    expected = plain_blocks(*leaves, [(4, 6), (1, 2), (4, 6)], cap, window)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    got = kernel.backward(gradient, (query, key, value), (found, sums), blocks)
    torch.testing.assert_close(got, wanted)
    if cap is None:
        flash = VarlenBlocks(0.3, stand_in_gpu(takes_float32=True)[0])
        torch.testing.assert_close(flash.forward(query, key, value, blocks), (found, sums))
        again = flash.backward(gradient, (query, key, value), (found, sums), blocks)
        torch.testing.assert_close(again, got)


def plain_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shapes: list[tuple[int, int]],
    cap: float | None,
    window: int | None,
) -> torch.Tensor:
    results, first, begin = [], 0, 0
    for queries, keys in shapes:
        q = query[first : first + queries].transpose(0, 1)
        k, v = (
            it[begin : begin + keys].transpose(0, 1).repeat_interleave(2, 0) for it in (key, value)
        )
        scores = q @ k.mT * 0.3
        scores = scores if cap is None else cap * (scores / cap).tanh()
        behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        hidden = (behind < 0) | (behind >= (window or keys))
        results.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
        first, begin = first + queries, begin + keys
    return torch.cat(results)


def test_torch_takes_the_calls_of_blocks() -> None:
    """Shapes alone, by torch's own kernels for GPUs."""
    blocks = Blocks((4, 4), (8, 8), torch.device("meta"))
    query, key, value = (
        torch.empty(n, heads, 16, dtype=torch.bfloat16, device="meta")
        for n, heads in ((8, 4), (16, 2), (16, 2))
    )
    kernel = VarlenBlocks(0.3, Platform(HOPPER))
    found, sums = kernel.forward(query, key, value, blocks)
    assert (found.shape, sums.shape) == (query.shape, (4, 8))
    gradients = kernel.backward(found, (query, key, value), (found, sums), blocks)
    assert [it.shape for it in gradients] == [query.shape, key.shape, value.shape]


def test_a_ring_of_one_attends_as_a_softmax_does() -> None:
    torch.manual_seed(0)
    tokens = (torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8))
    ring = Ring((6,), group(0, 1), CPU)
    found = ring_attention(tokens, ring, ProductBlocks(0.3), None)
    torch.testing.assert_close(found, plain_blocks(*tokens, [(6, 6)], None, None))


def test_ranks_of_a_ring_compute_alike_much_of_a_triangle() -> None:
    parts = [ContextPart.of((320,), CPU, group(rank, 8)) for rank in range(8)]
    assert len({int(it.tokens.sum()) for it in parts}) == 1

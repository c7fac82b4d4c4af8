"""Packed attention is the attention of each sample alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradus.errors import ConfigError
from gradus.trainer.model.attention import PackedLayout, packed_attention, padded_tokens

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None = None
) -> Tensor:
    module = torch.nn.Identity()
    layout = PackedLayout.build(lengths, CPU)
    output, _ = packed_attention(
        module,
        query,
        key,
        value,
        None,
        scaling=0.3,
        packed_layout=layout,
        sliding_window=window,
    )
    return output


def plain(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None = None
) -> Tensor:
    """Token by token, head by head."""
    heads, key_heads = query.shape[1], key.shape[1]
    rows, start = [], 0
    for length in lengths:
        for t in range(start, start + length):
            first = start if window is None else max(start, t - window + 1)
            outputs = []
            for head in range(heads):
                shared = head // (heads // key_heads)
                scores = key[0, shared, first : t + 1] @ query[0, head, t] * 0.3
                outputs.append(torch.softmax(scores, 0) @ value[0, shared, first : t + 1])
            rows.append(torch.stack(outputs))
        start += length
    return torch.stack(rows)[None]


def build(tokens: int, *, heads: int = 4, key_heads: int = 2, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(1, h, tokens, 8, requires_grad=True) for h in (heads, key_heads, key_heads)]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    grouped=st.booleans(),
    window=st.sampled_from([None, 3]),
)
def test_packed_attention_and_its_gradient_equal_the_plain_ones(
    lengths: list[int], grouped: bool, window: int | None
) -> None:
    leaves = build(sum(lengths), key_heads=2 if grouped else 4)
    found, expected = attend(*leaves, lengths, window), plain(*leaves, lengths, window)
    np.testing.assert_allclose(found.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("window", [None, 270])
def test_long_and_short_samples_in_one_row_agree_with_samples_alone(window: int | None) -> None:
    lengths = [280, 3, 260]
    leaves = build(sum(lengths))
    together = attend(*leaves, lengths, window)
    for number, start in enumerate([0, 280, 283]):
        part = slice(start, start + lengths[number])
        alone = attend(*(t[:, :, part] for t in leaves), [lengths[number]], window)
        np.testing.assert_allclose(together[:, part].detach(), alone.detach(), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_the_layout_shows_every_token_once_and_finds_it_again(lengths: list[int]) -> None:
    layout = PackedLayout.build(lengths, CPU)
    tokens = torch.arange(sum(lengths))
    rows = layout.rows
    assert torch.equal(rows.to_rows[rows.to_tokens], tokens)
    assert layout.boundaries.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert rows.to_rows.shape[0] == sum(b.samples * b.length for b in rows.blocks)
    padding = padded_tokens(lengths, CPU, torch.float32)
    assert padding == rows.to_rows.shape[0] - sum(lengths)


def test_samples_of_like_length_share_a_block_without_much_padding() -> None:
    layout = PackedLayout.build([50, 10, 48, 9, 44], CPU)
    assert [(b.samples, b.length) for b in layout.rows.blocks] == [(3, 50), (2, 10)]


def test_attention_that_is_not_computed_is_refused() -> None:
    query, key, value = build(2)
    layout = SimpleNamespace()
    with pytest.raises(ConfigError, match="softcap"):
        packed_attention(
            torch.nn.Identity(), query, key, value, None, packed_layout=layout, softcap=30.0
        )

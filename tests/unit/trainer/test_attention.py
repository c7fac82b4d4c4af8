"""Packed attention is the attention of each sample alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_stand_in import HOPPER, plain_varlen, stand_in_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradus.errors import ConfigError
from gradus.trainer.model.attention import PackedLayout, packed_attention
from gradus.trainer.model.cpu.attention import count_padding
from gradus.trainer.model.kernels import Platform

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    window: int | None = None,
    platform: Platform | None = None,
) -> Tensor:
    module = torch.nn.Identity()
    layout = replace(PackedLayout.build(lengths, CPU), platform=platform)
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
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_layout_shows_every_token_once_and_finds_it_again(
    lengths: list[int], dtype: torch.dtype
) -> None:
    layout = PackedLayout.build(lengths, CPU)
    tokens = torch.arange(sum(lengths))
    rows = layout.rows(dtype)
    assert torch.equal(rows.to_rows[rows.to_tokens], tokens)
    assert layout.boundaries.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert rows.to_rows.shape[0] == sum(b.samples * b.length for b in rows.blocks)
    padding = count_padding(lengths, dtype)
    assert padding == rows.to_rows.shape[0] - sum(lengths)


def test_samples_of_like_length_share_a_block_without_much_padding() -> None:
    layout = PackedLayout.build([50, 10, 48, 9, 44], CPU)
    rows = layout.rows(torch.bfloat16)
    assert [(b.samples, b.length) for b in rows.blocks] == [(3, 50), (2, 10)]
    assert not rows.is_plain
    rows = PackedLayout.build([150, 130, 120, 110], CPU).rows(torch.float32)
    assert [(b.samples, b.length) for b in rows.blocks] == [(1, 150), (1, 130), (2, 120)]


def test_a_long_sample_is_a_block_of_its_own_and_needs_no_padding() -> None:
    rows = PackedLayout.build([300, 299, 257], CPU).rows(torch.bfloat16)
    assert [(b.samples, b.length) for b in rows.blocks] == [(1, 300), (1, 299), (1, 257)]
    assert rows.is_plain
    assert count_padding([299, 257, 300], torch.bfloat16) == 0


def test_samples_that_are_not_longest_first_are_still_found_again() -> None:
    lengths = [260, 300]
    leaves = build(sum(lengths))
    assert not PackedLayout.build(lengths, CPU).rows(torch.float32).is_plain
    found = attend(*leaves, lengths)
    alone = attend(*(t[:, :, 260:] for t in leaves), [300])
    np.testing.assert_allclose(found[:, 260:].detach(), alone.detach(), rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    window=st.sampled_from([None, 3]),
)
def test_packed_attention_in_bfloat16_stays_near_the_plain_one(
    lengths: list[int], window: int | None
) -> None:
    """Short samples take another way in 16 bits: matrix products."""
    leaves = build(sum(lengths))
    found = attend(*(t.bfloat16() for t in leaves), lengths, window)
    expected = plain(*leaves, lengths, window)
    np.testing.assert_allclose(found.detach().float(), expected.detach(), rtol=0, atol=0.04)


def test_attention_that_is_not_computed_is_refused() -> None:
    query, key, value = build(2)
    layout = SimpleNamespace()
    with pytest.raises(ConfigError, match="position_bias"):
        packed_attention(
            torch.nn.Identity(), query, key, value, None, packed_layout=layout, position_bias=query
        )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("changed", ["a cap", "sinks", "narrow values", "sinks, narrow values"])
def test_what_flash_attention_lacks_is_computed_around_it(changed: str, window: int | None) -> None:
    """By padding, by another sum of weights and its gradients, and for caps by rectangles."""
    lengths = [7, 1, 12]
    found = []
    for gpu in (None, stand_in_gpu(takes_float32=True)):
        query, key, value = build(sum(lengths))
        leaves = [query, key, value[..., :6].detach().requires_grad_("narrow" in changed)]
        options: dict[str, object] = {"softcap": 3.0} if changed == "a cap" else {}
        if "sinks" in changed:
            leaves.append(torch.linspace(-1, 2, 4, requires_grad=True))
            options = {"s_aux": leaves[-1]}
        output, _ = packed_attention(
            torch.nn.Identity(),
            query,
            key,
            leaves[2] if "narrow" in changed else value,
            None,
            packed_layout=replace(PackedLayout.build(lengths, CPU), platform=gpu and gpu[0]),
            sliding_window=window,
            **options,
        )
        draw = torch.Generator().manual_seed(0)
        output.backward(torch.randn(output.shape, generator=draw))
        found.append([output, *(leaf.grad for leaf in (*leaves, value) if leaf.grad is not None)])
        assert gpu is None or gpu[1].varlen == (changed != "a cap")
    assert len(found[0]) >= 4
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_kernel_of_gpus_is_asked_for_the_same_attention(
    window: int | None, key_heads: int
) -> None:
    lengths = [7, 1, 12]
    leaves = build(sum(lengths), key_heads=key_heads)
    gpu, calls = stand_in_gpu()
    found = attend(*(t.bfloat16() for t in leaves), lengths, window, gpu)
    expected = plain(*leaves, lengths, window)
    np.testing.assert_allclose(found.detach().float(), expected.detach(), rtol=0, atol=0.04)
    assert calls.varlen == 1


@pytest.mark.parametrize("window", [None, 3])
def test_the_plain_form_of_that_kernel_is_the_plain_attention(window: int | None) -> None:
    lengths = [7, 1, 12]
    leaves = build(sum(lengths))
    starts = PackedLayout.build(lengths, CPU).boundaries
    found = plain_varlen(
        *(t[0].transpose(0, 1) for t in leaves),
        starts,
        starts,
        12,
        12,
        scale=0.3,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    expected = plain(*leaves, lengths, window)[0]
    np.testing.assert_allclose(found.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_torch_takes_the_call_of_its_kernel_forward_and_backward(
    window: int | None, has_sinks: bool
) -> None:
    """On tensors without values: arguments, shapes and the way back, not numbers."""
    query, key, value = (
        torch.empty(1, h, 20, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for h in (4, 2, 2)
    )
    boundaries = torch.empty(3, dtype=torch.int32, device="meta")
    layout = PackedLayout((12, 8), boundaries, platform=Platform(HOPPER))
    module = torch.nn.Identity()
    output, _ = packed_attention(
        module,
        query,
        key,
        value,
        None,
        packed_layout=layout,
        sliding_window=window,
        s_aux=torch.empty(4, device="meta", requires_grad=True) if has_sinks else None,
    )
    assert output.shape == (1, 20, 4, 8)
    output.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_heads_that_flash_attention_does_not_know_take_the_other_way() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 5, 12) for _ in range(3)]
    gpu, calls = stand_in_gpu()
    found = attend(*(t.bfloat16() for t in leaves), [2, 3], None, gpu)
    expected = plain(*leaves, [2, 3])
    np.testing.assert_allclose(found.float(), expected, rtol=0, atol=0.04)
    assert calls.varlen == 0


def test_without_that_kernel_nothing_is_padded_away_silently() -> None:
    assert count_padding([10, 9], torch.bfloat16) == 1

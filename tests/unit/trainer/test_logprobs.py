"""Logprobs and entropies in blocks equal the plain ones, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_stand_in import stand_in_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradus.trainer.logprobs import chosen_logprobs
from gradus.trainer.model.kernels import BlockSize, DeviceFacts, Platform

pytestmark = pytest.mark.torch


def cut(block: BlockSize) -> Platform:
    """A CPU whose blocks of logits have this size."""
    return Platform(DeviceFacts("cpu"), block=block)


def build(tokens: int, *, vocabulary: int = 11, bias: bool = False, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    tensors = [torch.randn(tokens, 6), torch.randn(vocabulary, 6)]
    if bias:
        tensors.append(torch.randn(vocabulary))
    return [t.requires_grad_() for t in tensors]


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    bias: Tensor | None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits / temperatures[:, None]
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    block=st.builds(BlockSize, st.integers(1, 12), st.integers(1, 13)),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
    entropy_weight=st.sampled_from([0.0, 0.3]),
    cap=st.sampled_from([None, 2.0]),
)
def test_blocks_give_the_plain_values_and_gradients(
    tokens: int, block: BlockSize, bias: bool, seed: int, entropy_weight: float, cap: float | None
) -> None:
    leaves = build(tokens, bias=bias, seed=seed)
    hidden, weight, offset = (*leaves, None)[:3] if not bias else leaves
    labels = torch.randint(0, 11, (tokens,))
    temperatures = torch.rand(tokens) + 0.5
    results = []
    for function in (
        lambda: chosen_logprobs(
            *(hidden, weight, labels, temperatures),
            bias=offset,
            cap=cap,
            platform=cut(block),
        ),
        lambda: plain(hidden, weight, labels, temperatures, offset, cap),
    ):
        logprobs, entropies = function()
        mixed = (logprobs * torch.arange(tokens)).sum() + entropy_weight * entropies.sum()
        gradients = torch.autograd.grad(mixed, leaves)
        results.append([logprobs.detach(), entropies.detach(), *gradients])
    for chunked, whole in zip(*results, strict=True):
        np.testing.assert_allclose(chunked, whole, rtol=2e-4, atol=2e-5)


def test_temperature_divides_the_logits() -> None:
    hidden, weight = build(1)
    logits = hidden @ weight.T
    for temperature in (0.5, 1.0, 2.0):
        found, _ = chosen_logprobs(hidden, weight, torch.tensor([3]), torch.tensor([temperature]))
        expected = torch.log_softmax(logits / temperature, dim=-1)[0, 3]
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_each_token_has_its_own_temperature() -> None:
    hidden, weight = build(1)
    both = hidden.expand(2, -1)
    labels = torch.tensor([3, 3])
    found, entropies = chosen_logprobs(both, weight, labels, torch.tensor([0.5, 2.0]))
    assert found[0] != found[1]
    assert entropies[0] < entropies[1]


def test_a_certain_choice_has_no_entropy_and_no_nan() -> None:
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    logprobs, entropies = chosen_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([1.0]))
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), hidden)
    assert logprobs.item() == 0
    assert entropies.item() == pytest.approx(0, abs=1e-3)
    assert torch.isfinite(gradient).all()


def test_no_tokens_still_reach_every_parameter() -> None:
    hidden, weight = build(0)
    logprobs, _ = chosen_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_uniform_logits_give_minus_ln_v() -> None:
    hidden, weight = torch.zeros(1, 4), torch.zeros(8, 4)
    logprobs, entropies = chosen_logprobs(hidden, weight, torch.tensor([5]), torch.tensor([1.0]))
    assert logprobs.item() == pytest.approx(-np.log(8))
    assert entropies.item() == pytest.approx(np.log(8))


def test_low_precision_states_give_float32_logprobs() -> None:
    hidden, weight = (t.detach().bfloat16().requires_grad_() for t in build(4))
    logprobs, entropies = chosen_logprobs(hidden, weight, torch.tensor([0, 1, 2, 3]), torch.ones(4))
    logprobs.sum().backward()
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


small_blocks = pytest.mark.parametrize(
    "block", [BlockSize(2, 3), BlockSize(7, 2), BlockSize(1, 11), BlockSize(99, 99)], ids=str
)


@small_blocks
def test_derivatives_are_right_in_float64(block: BlockSize) -> None:
    leaves = [leaf.detach().double().requires_grad_() for leaf in build(5, bias=True)]
    labels, temperatures = torch.tensor([0, 10, 3, 3, 7]), torch.rand(5).double() + 0.5

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_logprobs(hidden, weight, labels, temperatures, bias=bias, platform=cut(block))

    assert torch.autograd.gradcheck(scores, leaves)


@small_blocks
def test_float64_agrees_with_the_plain_form_to_the_last_digits(block: BlockSize) -> None:
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in build(6, seed=4))
    labels, temperatures = torch.randint(0, 11, (6,)), torch.rand(6).double() + 0.5
    results = []
    for function, options in ((chosen_logprobs, {"platform": cut(block)}), (plain, {"bias": None})):
        logprobs, entropies = function(hidden, weight, labels, temperatures, **options)
        loss = (logprobs * torch.arange(6)).sum() + (entropies * torch.arange(6).flip(0)).sum()
        results.append([logprobs, entropies, *torch.autograd.grad(loss, (hidden, weight))])
    for blocked, whole in zip(*results, strict=True):
        torch.testing.assert_close(blocked, whole, rtol=1e-12, atol=1e-12)


@small_blocks
def test_large_logits_of_any_order_do_not_overflow(block: BlockSize) -> None:
    """The running maximum may rise or fall from block to block."""
    weight = torch.tensor([[-900.0], [-3.0], [0.0], [2.0], [900.0], [5.0]])
    for scale in (1.0, -1.0):
        hidden = torch.full((3, 1), scale, requires_grad=True)
        labels, ones = torch.tensor([0, 4, 2]), torch.ones(3)
        logprobs, entropies = chosen_logprobs(hidden, weight, labels, ones, platform=cut(block))
        expected, _ = plain(hidden, weight, labels, ones, None)
        torch.testing.assert_close(logprobs, expected)
        (gradient,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), hidden)
        assert torch.isfinite(gradient).all()


@small_blocks
def test_a_logit_of_minus_infinity_has_no_share(block: BlockSize) -> None:
    hidden, weight = build(4)
    bias = torch.zeros(11)
    bias[[0, 1, 2, 9]] = -torch.inf
    labels, ones = torch.tensor([3, 4, 5, 10]), torch.ones(4)
    kept = torch.tensor([3, 4, 5, 6, 7, 8, 10])
    blocked = chosen_logprobs(hidden, weight, labels, ones, bias=bias, platform=cut(block))
    whole = plain(hidden, weight[kept], torch.tensor([0, 1, 2, 6]), ones, None)
    for some, expected in zip(blocked, whole, strict=True):
        torch.testing.assert_close(some, expected)
    gradients = torch.autograd.grad(blocked[0].sum() + blocked[1].sum(), (hidden, weight))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    hidden, weight = build(4)
    labels, ones = torch.tensor([0, 1, 2, 3]), torch.ones(4)
    (expected,) = torch.autograd.grad(
        chosen_logprobs(hidden, weight, labels, ones)[0].sum(), hidden
    )
    frozen = weight.detach()
    logprobs, _ = chosen_logprobs(hidden, frozen, labels, ones)
    logprobs.sum().backward()
    torch.testing.assert_close(hidden.grad, expected)
    assert frozen.grad is None


def test_the_block_size_moves_results_by_rounding_only() -> None:
    hidden, weight = build(50, vocabulary=300)
    labels, ones = torch.randint(0, 300, (50,)), torch.ones(50)
    whole = chosen_logprobs(hidden, weight, labels, ones, platform=cut(BlockSize(50, 300)))
    for block in (BlockSize(8, 300), BlockSize(50, 64), BlockSize(7, 11)):
        for some, expected in zip(
            chosen_logprobs(hidden, weight, labels, ones, platform=cut(block)), whole, strict=True
        ):
            torch.testing.assert_close(some, expected, rtol=2e-6, atol=2e-6)


def test_no_tensor_is_as_large_as_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product with the head, on both ways, gives at most one block."""
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def watched(*arguments: Tensor) -> Tensor:
        logits = linear(*arguments)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    hidden, weight = build(64, vocabulary=1000)
    labels = torch.zeros(64, dtype=torch.int64)
    block = BlockSize(16, 128)
    chosen_logprobs(hidden, weight, labels, torch.ones(64), platform=cut(block))[0].sum().backward()
    assert max(seen) == 16 * 128
    assert sum(seen) == 2 * 64 * 1000


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cpu with bfloat16", "cuda"])
def test_bfloat16_logits_are_not_rounded_where_it_matters(kind: str, has_bias: bool) -> None:
    """At logits of about ±10 rounding each to bfloat16 moves a logprob by a hundredth of a nat."""
    has_instructions = kind == "cpu with bfloat16"
    here = Platform(DeviceFacts("cpu", has_bfloat16=has_instructions))
    gpu, calls = stand_in_gpu()
    chosen = gpu if kind == "cuda" else here
    hidden = torch.randn(64, 256).bfloat16()
    weight = (torch.randn(500, 256) * 3 / 16).bfloat16()
    bias = torch.randn(500).bfloat16() if has_bias else None
    labels, ones = torch.randint(0, 500, (64,)), torch.ones(64)
    logits = hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    expected = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)

    found, _ = chosen_logprobs(hidden, weight, labels, ones, bias=bias, platform=chosen)
    error = float((found.double() - expected).abs().mean())
    assert error < (2e-3 if has_instructions else 5e-5)
    assert (calls.widening > 0) == (kind == "cuda")


def test_on_cuda_the_gradient_of_the_head_is_added_up_in_float32() -> None:
    """The factors of the product stay rounded; the products of the blocks do not."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    labels, ones = torch.randint(0, 40, (512,)), torch.ones(512)
    seen: list[torch.dtype] = []

    def gradients(chosen: Platform) -> Tensor:
        leaf = weight.clone().requires_grad_()
        logprobs, _ = chosen_logprobs(hidden, leaf, labels, ones, platform=chosen)
        (found,) = torch.autograd.grad(logprobs.sum(), leaf)
        seen.append(found.dtype)
        return found.double()

    leaf = weight.double().requires_grad_()
    exact = plain(hidden.double(), leaf, labels, ones.double(), None)[0].sum()
    (expected,) = torch.autograd.grad(exact, leaf)
    gpu, calls = stand_in_gpu(block=BlockSize(16, 8))
    rounded = gradients(Platform(DeviceFacts("cpu"), block=BlockSize(16, 8)))
    kept = gradients(gpu)
    # 32 blocks of tokens and 5 of words; logits twice, and the gradients of both factors.
    assert calls.widening == 32 * 5 * 4
    assert float((kept - expected).norm()) < 0.9 * float((rounded - expected).norm())
    assert seen == [torch.bfloat16, torch.bfloat16]

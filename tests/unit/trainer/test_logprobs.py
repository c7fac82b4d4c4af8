"""Chunked logprobs and entropies equal the plain ones, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradus.trainer.logprobs import chosen_logprobs

pytestmark = pytest.mark.torch


def build(tokens: int, *, vocabulary: int = 11, bias: bool = False, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    tensors = [torch.randn(tokens, 6), torch.randn(vocabulary, 6)]
    if bias:
        tensors.append(torch.randn(vocabulary))
    return [t.requires_grad_() for t in tensors]


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperatures: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 12),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
    entropy_weight=st.sampled_from([0.0, 0.3]),
)
def test_chunks_give_the_plain_values_and_gradients(
    tokens: int, chunk: int, bias: bool, seed: int, entropy_weight: float
) -> None:
    leaves = build(tokens, bias=bias, seed=seed)
    hidden, weight, offset = (*leaves, None)[:3] if not bias else leaves
    labels = torch.randint(0, 11, (tokens,))
    temperatures = torch.rand(tokens) + 0.5
    results = []
    for function in (
        lambda: chosen_logprobs(
            hidden, weight, labels, temperatures, bias=offset, chunk_tokens=chunk
        ),
        lambda: plain(hidden, weight, labels, temperatures, offset),
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

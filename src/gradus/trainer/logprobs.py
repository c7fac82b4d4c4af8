"""Log-softmax and entropy of chosen tokens, in blocks: [tokens, vocabulary] never exists.

The sum over the vocabulary runs online: each block of logits moves a running maximum, a running sum
of exponentials and a running first moment. The backward pass computes each block again. Shapes:
N chosen tokens, H hidden size, V vocabulary, C tokens and W words of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LOWEST_LOGPROB = -1e4
"""exp of it is 0; keeps -inf logits out of products with 0."""
_LOG2_E = 1 / math.log(2)


class BlockSize(NamedTuple):
    """Largest block of logits that exists at once."""

    tokens: int
    vocabulary: int


class _Form(NamedTuple):
    """How logits are computed."""

    block: BlockSize
    is_exact: bool


_CPU_BLOCK = BlockSize(tokens=512, vocabulary=1024)
_CUDA_BLOCK = BlockSize(tokens=4096, vocabulary=16384)
"""Near the caches of a CPU core; large enough to fill a GPU."""


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    block: BlockSize | None = None,
    is_exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """Float32 logprobs [N] of `labels`, and the entropies [N] of their distributions, in nats.

    The logits are `hidden @ weight.T (+ bias)` in float32 (float64 if that is the dtype of
    `hidden`), divided by each token's temperature; without `is_exact` the product is rounded to the
    dtype of `hidden` first. Both results carry gradient to `hidden`, `weight` and `bias`; an unused
    entropy costs nothing on the way back.
    """
    form = _Form(block or _block_for(weight, hidden.is_cuda), is_exact)
    logprobs, entropies = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, temperatures, form
    )
    return logprobs, entropies


def _block_for(weight: Tensor, is_cuda: bool) -> BlockSize:
    """The usual block; a small vocabulary leaves room for more tokens."""
    usual = _CUDA_BLOCK if is_cuda else _CPU_BLOCK
    vocabulary = min(usual.vocabulary, weight.shape[0])
    return BlockSize(usual.tokens * usual.vocabulary // vocabulary, vocabulary)


@dataclass(frozen=True)
class _Head:
    """The output layer with the states and temperatures of the chosen tokens."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperatures: Tensor
    form: _Form

    @property
    def dtype(self) -> torch.dtype:
        """Of logits, sums and accumulated gradients."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def word_blocks(self) -> Iterator[slice]:
        return _slices(self.weight.shape[0], self.form.block.vocabulary)

    def token_blocks(self) -> Iterator[slice]:
        return _slices(self.hidden.shape[0], self.form.block.tokens)

    @property
    def is_shifted(self) -> bool:
        """Whether logits are computed as distances from likely ones."""
        is_exact = self.form.is_exact and self.hidden.dtype == torch.bfloat16
        return is_exact and not self.hidden.is_cuda and _has_bfloat16_instructions()

    def logits(self, tokens: slice, words: slice, likely: Tensor) -> Tensor:
        """[C, W] logits of the sampled distribution; the caller owns the memory.

        `likely` [C] are about as large as the largest logits of each token over the vocabulary.
        """
        hidden, weight = self.hidden[tokens], self.weight[words]
        bias = None if self.bias is None else self.bias[words]
        if self.form.is_exact and hidden.dtype == torch.bfloat16:
            raw = likely * self.temperatures[tokens]
            logits = self._product(hidden, weight, raw)
            logits = logits if bias is None else logits.add_(bias)
        else:
            logits = torch.nn.functional.linear(hidden, weight, bias).to(self.dtype)
        return logits.div_(self.temperatures[tokens, None])

    def _product(self, hidden: Tensor, weight: Tensor, likely: Tensor) -> Tensor:
        """hidden @ weight.T of bfloat16 values in float32.

        A CPU with instructions for bfloat16 rounds its sums to bfloat16. There a sum begins at
        minus the likely logit, so that what is rounded is the distance from it: small where the
        probability is not. Without the instructions float32 is the faster arithmetic.
        """
        if hidden.is_cuda:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        if not self.is_shifted:
            return torch.nn.functional.linear(hidden.float(), weight.float())
        origin = likely.to(torch.bfloat16)[:, None]
        distance = torch.addmm(-origin.expand(-1, weight.shape[0]), hidden, weight.T)
        return distance.float().add_(origin)

    def label_logits(self, labels: Tensor) -> Tensor:
        """[N] float32 logits of the labels, for the shifted form."""
        found = torch.empty(labels.shape, dtype=torch.float32)
        for tokens in self.token_blocks():
            chosen = labels[tokens]
            product = self.hidden[tokens].float() * self.weight[chosen].float()
            found[tokens] = product.sum(dim=1)
            if self.bias is not None:
                found[tokens] += self.bias[chosen]
        return found / self.temperatures


@cache
def _has_bfloat16_instructions() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16"))


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class _Sums:
    """Running maximum, Σ exp(logit - maximum) and Σ exp(logit - maximum)·(logit - maximum), [N]."""

    def __init__(self, count: int, like: Tensor, dtype: torch.dtype) -> None:
        self.highest = torch.full((count,), torch.finfo(dtype).min, dtype=dtype, device=like.device)
        self.total = torch.zeros_like(self.highest)
        self.moment = torch.zeros_like(self.highest)

    def add(self, tokens: slice, logits: Tensor) -> None:
        """Take in one block; destroys `logits`."""
        before, total = self.highest[tokens], self.total[tokens]
        highest = torch.maximum(before, logits.amax(dim=1))
        step = before - highest
        shrink = step.exp()
        shifted = logits.sub_(highest[:, None]).clamp_(min=_LOWEST_LOGPROB)
        exponentials = _exp(shifted)
        self.moment[tokens] = shrink * (self.moment[tokens] + total * step)
        self.total[tokens] = shrink * total + exponentials.sum(dim=1)
        self.moment[tokens] += exponentials.mul_(shifted).sum(dim=1)
        self.highest[tokens] = highest


class _ChosenLogprobs(torch.autograd.Function):
    """Keeps [N] normalisers and entropies for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperatures: Tensor,
        form: _Form,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, temperatures, form)
        sums = _Sums(hidden.shape[0], hidden, head.dtype)
        chosen = torch.zeros_like(sums.total)
        exact = head.label_logits(labels) if head.is_shifted else None
        for words in head.word_blocks():
            for tokens in head.token_blocks():
                likely = sums.highest[tokens]
                if exact is not None:
                    likely = torch.maximum(likely, exact[tokens])
                    if words.start == 0:  # Nothing is known of the largest logits yet.
                        rough = head.logits(tokens, words, likely).amax(dim=1)
                        likely = torch.maximum(likely, rough)
                logits = head.logits(tokens, words, likely)
                column, is_inside = _columns(labels[tokens], words)
                found = logits.gather(1, column).squeeze(1)
                chosen[tokens] = torch.where(is_inside, found, chosen[tokens])
                sums.add(tokens, logits)
        chosen = chosen if exact is None else exact
        log_total = sums.total.log()
        entropies = log_total - sums.moment / sums.total
        ctx.form = form
        ctx.save_for_backward(
            hidden, weight, bias, labels, temperatures, sums.highest + log_total, entropies
        )
        ctx.set_materialize_grads(False)
        return chosen - sums.highest - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperatures, normalisers, entropies = ctx.saved_tensors
        head = _Head(hidden, weight, bias, temperatures, ctx.form)
        for_logprobs, for_entropies = gradients
        if for_logprobs is None:
            for_logprobs = torch.zeros_like(normalisers)
        upstream = _Upstream(labels, normalisers, entropies, for_logprobs, for_entropies)
        by_hidden = torch.zeros_like(hidden, dtype=head.dtype)
        by_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        by_bias = None if bias is None else torch.empty_like(bias)
        for words in head.word_blocks():
            part = _HeadGradient.zeros(head, words, needs_weight=by_weight is not None)
            for tokens in head.token_blocks():
                by_logits = upstream.by_logits(
                    head.logits(tokens, words, normalisers[tokens]), tokens, words
                )
                by_logits = by_logits.div_(temperatures[tokens, None]).to(hidden.dtype)
                _add_product(by_hidden[tokens], by_logits, weight[words])
                part.add(by_logits, hidden[tokens])
            if by_weight is not None and part.weight is not None:
                by_weight[words] = part.weight
            if by_bias is not None and part.bias is not None:
                by_bias[words] = part.bias
        return by_hidden.to(hidden.dtype), by_weight, by_bias, None, None, None


def _exp(log_p: Tensor) -> Tensor:
    """e to the power of logprobs, which are 0 at most.

    On a CPU torch's exp2 takes a third of the time of its exp. Rounding the product moves a result
    by x·e^-x of the dtype's precision, at most 0.4 of it.
    """
    if log_p.is_cuda:
        return log_p.exp()
    return (log_p * _LOG2_E).exp2_()


def _columns(labels: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """[C, 1] column of each label in this block, any valid one where it lies elsewhere; and [C]
    whether it lies in this block."""
    is_inside = (labels >= words.start) & (labels < words.stop)
    return (labels - words.start).clamp(0, words.stop - words.start - 1)[:, None], is_inside


@dataclass(frozen=True)
class _Upstream:
    """What arrives from the loss, [N] each."""

    labels: Tensor
    normalisers: Tensor
    entropies: Tensor
    for_logprobs: Tensor
    for_entropies: Tensor | None
    """None when no loss uses the entropies."""

    def by_logits(self, logits: Tensor, tokens: slice, words: slice) -> Tensor:
        """[C, W]: d logprob = onehot - p and d entropy = -p·(ln p + H), each times its gradient."""
        log_p = logits.sub_(self.normalisers[tokens, None]).clamp_(min=_LOWEST_LOGPROB)
        gradient = _exp(log_p)
        if self.for_entropies is None:
            gradient.mul_(-self.for_logprobs[tokens, None])
        else:
            factor = log_p.add_(self.entropies[tokens, None])
            factor.mul_(-self.for_entropies[tokens, None]).sub_(self.for_logprobs[tokens, None])
            gradient.mul_(factor)
        column, is_inside = _columns(self.labels[tokens], words)
        own = torch.where(is_inside, self.for_logprobs[tokens], 0.0)
        gradient.scatter_add_(1, column, own[:, None])
        return gradient


@dataclass(frozen=True)
class _HeadGradient:
    """Gradients of some words, summed over tokens in the dtype of the logits."""

    weight: Tensor | None
    """None when the layer is frozen."""
    bias: Tensor | None

    @classmethod
    def zeros(cls, head: _Head, words: slice, *, needs_weight: bool) -> _HeadGradient:
        shape = head.weight[words].shape
        sums = head.temperatures.new_zeros
        return cls(
            weight=sums(shape, dtype=head.dtype) if needs_weight else None,
            bias=None if head.bias is None else sums(shape[:1], dtype=head.dtype),
        )

    def add(self, by_logits: Tensor, hidden: Tensor) -> None:
        """Take in the gradient [C, W] of one block of logits."""
        if self.weight is not None:
            _add_product(self.weight, by_logits.T, hidden)
        if self.bias is not None:
            self.bias.add_(by_logits.sum(dim=0, dtype=self.bias.dtype))


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right."""
    if target.dtype == left.dtype:
        target.addmm_(left, right)
    else:
        target.add_(left @ right)

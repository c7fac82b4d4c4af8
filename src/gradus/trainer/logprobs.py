"""Log-softmax and entropy of chosen tokens, in blocks: [tokens, vocabulary] never exists.

The sum over the vocabulary runs online: each block of logits moves a running maximum, a running sum
of exponentials and a running first moment. The backward pass computes each block again. Shapes:
N chosen tokens, H hidden size, V vocabulary, C tokens and W words of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradus.trainer.model.cpu.head import (
    exp_of_logprobs,
    float32_product,
    label_products,
    shifted_product,
)
from gradus.trainer.model.gpu.head import (
    LOWEST_LOGPROB,
    Backend,
    RunningSums,
    TokenGradients,
    add_in_one_pass,
    gradient_in_one_pass,
)
from gradus.trainer.model.kernels import (
    BlockSize,
    Platform,
    Product,
    WideningProduct,
    compiles,
    head_block,
    head_product,
)


class _Form(NamedTuple):
    """How logits are computed."""

    block: BlockSize
    product: Product
    is_cpu: bool
    widening: WideningProduct
    cap: float | None
    compile_backend: Backend | None
    """Makes one pass of what is done to a block of logits; None where that is done step by step."""

    @classmethod
    def of(cls, platform: Platform, hidden: Tensor, weight: Tensor, cap: float | None) -> _Form:
        facts = platform.facts
        product = head_product(facts, hidden.dtype)
        return cls(
            block=platform.block or head_block(facts, weight.shape[0]),
            # Capped logits do not say near which product a shifted one should begin.
            product="float32" if cap and product == "shifted" else product,
            is_cpu=facts.kind == "cpu",
            widening=platform.widening,
            cap=cap,
            compile_backend=(
                platform.compile_backend if cap is None and compiles(facts, "auto") else None
            ),
        )

    def add_product(self, target: Tensor, left: Tensor, right: Tensor) -> None:
        """target += left @ right, in the dtype of the target where that can be had."""
        if target.dtype == left.dtype:
            target.addmm_(left, right)
        elif self.product == "widening":
            self.widening(left, right, target)
        else:
            target.add_(left @ right)

    def exp(self, log_p: Tensor) -> Tensor:
        """e to the power of logprobs, which are 0 at most."""
        return exp_of_logprobs(log_p) if self.is_cpu else log_p.exp()


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    cap: float | None = None,
    platform: Platform | None = None,
) -> tuple[Tensor, Tensor]:
    """Float32 logprobs [N] of `labels`, and the entropies [N] of their distributions, in nats.

    The logits are `hidden @ weight.T (+ bias)` in float32 (float64 if that is the dtype of
    `hidden`), kept between -cap and cap by
    cap · tanh(logit / cap), and divided by each token's temperature. Both results carry
    gradient to `hidden`, `weight` and `bias`; an unused entropy costs nothing on the way back.
    `platform` is that of `hidden` unless a test says otherwise.
    """
    form = _Form.of(platform or Platform.of(hidden.device), hidden, weight, cap)
    logprobs, entropies = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, temperatures, form
    )
    return logprobs, entropies


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

    def logits(self, tokens: slice, words: slice, likely: Tensor) -> Tensor:
        """[C, W] logits of the sampled distribution; the caller owns the memory.

        `likely` [C] are about as large as the largest logits of each token over the vocabulary.
        """
        if self.form.product in ("plain", "widening"):
            logits, bias = self.product(tokens, words)
        else:
            bias = None if self.bias is None else self.bias[words]
            logits = self._cpu_product(tokens, words, likely * self.temperatures[tokens])
        logits = logits if bias is None else logits.add_(bias)
        if self.form.cap is not None:
            logits = logits.div_(self.form.cap).tanh_().mul_(self.form.cap)
        return logits.div_(self.temperatures[tokens, None])

    def cap_slope(self, logits: Tensor, tokens: slice) -> Tensor | None:
        """[C, W] derivative of the cap, from the logits that `logits` gave; None without one."""
        if self.form.cap is None:
            return None
        share = logits * (self.temperatures[tokens, None] / self.form.cap)
        return share.square_().neg_().add_(1.0)

    def product(self, tokens: slice, words: slice) -> tuple[Tensor, Tensor | None]:
        """[C, W] logits before temperatures, and the bias [W] that they lack."""
        hidden, weight = self.hidden[tokens], self.weight[words]
        bias = None if self.bias is None else self.bias[words]
        if self.form.product == "plain":
            return torch.nn.functional.linear(hidden, weight, bias).to(self.dtype), None
        return self.form.widening(hidden, weight.T), bias

    def _cpu_product(self, tokens: slice, words: slice, likely: Tensor) -> Tensor:
        """hidden @ weight.T of 16-bit values in float32."""
        hidden, weight = self.hidden[tokens], self.weight[words]
        if self.form.product == "shifted":
            return shifted_product(hidden, weight, likely)
        return float32_product(hidden, weight)

    def label_logits(self, labels: Tensor) -> Tensor:
        """[N] float32 logits of the labels, for the shifted form."""
        tokens = self.form.block.tokens
        products = label_products(self.hidden, self.weight, self.bias, labels, tokens)
        return products / self.temperatures


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class _Sums:
    """Running maximum, Σ exp(logit - maximum) and Σ exp(logit - maximum)·(logit - maximum), [N]."""

    def __init__(self, head: _Head) -> None:
        self._exp = head.form.exp
        lowest = torch.finfo(head.dtype).min
        self.highest = head.hidden.new_full((len(head.hidden),), lowest, dtype=head.dtype)
        self.total = torch.zeros_like(self.highest)
        self.moment = torch.zeros_like(self.highest)

    def add_in_one_pass(
        self,
        tokens: slice,
        product: tuple[Tensor, Tensor | None],
        of: tuple[Tensor, Tensor],
        backend: Backend,
    ) -> Tensor:
        """Take in one block; gives the logits [C] of the labels."""
        before = RunningSums(self.highest[tokens], self.total[tokens], self.moment[tokens])
        found, after = add_in_one_pass(*product, of, before, backend)
        self.highest[tokens], self.total[tokens], self.moment[tokens] = after
        return found

    def add(self, tokens: slice, logits: Tensor) -> None:
        """Take in one block; destroys `logits`."""
        before, total = self.highest[tokens], self.total[tokens]
        highest = torch.maximum(before, logits.amax(dim=1))
        step = before - highest
        shrink = step.exp()
        shifted = logits.sub_(highest[:, None]).clamp_(min=LOWEST_LOGPROB)
        exponentials = self._exp(shifted)
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
        sums = _Sums(head)
        chosen = torch.zeros_like(sums.total)
        exact = head.label_logits(labels) if head.form.product == "shifted" else None
        for words in head.word_blocks():
            for tokens in head.token_blocks():
                column, is_inside = _columns(labels[tokens], words)
                if form.compile_backend is not None:
                    product, of = head.product(tokens, words), (column, temperatures[tokens])
                    found = sums.add_in_one_pass(tokens, product, of, form.compile_backend)
                else:
                    likely = sums.highest[tokens]
                    if exact is not None:
                        likely = torch.maximum(likely, exact[tokens])
                        if words.start == 0:  # Nothing is known of the largest logits yet.
                            rough = head.logits(tokens, words, likely).amax(dim=1)
                            likely = torch.maximum(likely, rough)
                    logits = head.logits(tokens, words, likely)
                    found = logits.gather(1, column).squeeze(1)
                    sums.add(tokens, logits)
                chosen[tokens] = torch.where(is_inside, found, chosen[tokens])
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
        upstream = _Upstream(labels, normalisers, entropies, for_logprobs, for_entropies, ctx.form)
        by_hidden = torch.zeros_like(hidden, dtype=head.dtype)
        by_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        by_bias = None if bias is None else torch.empty_like(bias)
        for words in head.word_blocks():
            part = _HeadGradient.zeros(head, words, needs_weight=by_weight is not None)
            for tokens in head.token_blocks():
                by_logits = upstream.of_block(head, tokens, words)
                head.form.add_product(by_hidden[tokens], by_logits, weight[words])
                part.add(by_logits, hidden[tokens])
            if by_weight is not None and part.weight is not None:
                by_weight[words] = part.weight
            if by_bias is not None and part.bias is not None:
                by_bias[words] = part.bias
        return by_hidden.to(hidden.dtype), by_weight, by_bias, None, None, None


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
    form: _Form

    def of_block(self, head: _Head, tokens: slice, words: slice) -> Tensor:
        """[C, W] gradient by the logits before temperatures, in the dtype of the states."""
        temperatures = head.temperatures[tokens]
        if self.form.compile_backend is not None:
            logits, bias = head.product(tokens, words)
            of = TokenGradients(
                self.labels[tokens] - words.start,
                temperatures,
                self.normalisers[tokens],
                self.entropies[tokens],
                self.for_logprobs[tokens],
                None if self.for_entropies is None else self.for_entropies[tokens],
            )
            dtype, backend = head.hidden.dtype, self.form.compile_backend
            return gradient_in_one_pass(logits, bias, of, dtype, backend)
        logits = head.logits(tokens, words, self.normalisers[tokens])
        slope = head.cap_slope(logits, tokens)
        by_logits = self.by_logits(logits, tokens, words)
        by_logits = by_logits if slope is None else by_logits.mul_(slope)
        return by_logits.div_(temperatures[:, None]).to(head.hidden.dtype)

    def by_logits(self, logits: Tensor, tokens: slice, words: slice) -> Tensor:
        """[C, W]: d logprob = onehot - p and d entropy = -p·(ln p + H), each times its gradient."""
        log_p = logits.sub_(self.normalisers[tokens, None]).clamp_(min=LOWEST_LOGPROB)
        gradient = self.form.exp(log_p)
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
    form: _Form

    @classmethod
    def zeros(cls, head: _Head, words: slice, *, needs_weight: bool) -> _HeadGradient:
        shape = head.weight[words].shape
        sums = head.temperatures.new_zeros
        return cls(
            weight=sums(shape, dtype=head.dtype) if needs_weight else None,
            bias=None if head.bias is None else sums(shape[:1], dtype=head.dtype),
            form=head.form,
        )

    def add(self, by_logits: Tensor, hidden: Tensor) -> None:
        """Take in the gradient [C, W] of one block of logits."""
        if self.weight is not None:
            self.form.add_product(self.weight, by_logits.T, hidden)
        if self.bias is not None:
            self.bias.add_(by_logits.sum(dim=0, dtype=self.bias.dtype))

"""Log-softmax and entropy of chosen tokens, in chunks, so that [tokens, vocabulary] never exists.

Shapes: N chosen tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_LOGITS = 1 << 22
"""Most C·V float32 logits that exist at once (16 MiB)."""


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Float32 logprobs [N] of `labels`, and the entropies [N] of their distributions, in nats.

    The logits are `hidden @ weight.T (+ bias)` in the dtype of `hidden`, then float32, divided by
    each token's temperature. Both results carry gradient to `hidden`, `weight` and `bias`.
    """
    chunk = chunk_tokens or max(1, _CHUNK_LOGITS // weight.shape[0])
    logprobs, entropies = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, temperatures, chunk
    )
    return logprobs, entropies


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor
) -> Tensor:
    """[C, V] float32 logits of the sampled distribution."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits.div_(temperatures[:, None])


class _ChosenLogprobs(torch.autograd.Function):
    """Keeps [N] normalisers for the backward pass and computes each chunk's logits again there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperatures: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(labels.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        for start in range(0, labels.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _scaled_logits(hidden[part], weight, bias, temperatures[part])
            normaliser = logits.logsumexp(dim=-1)
            chosen = logits.gather(1, labels[part, None]).squeeze(1)
            logprobs[part] = chosen - normaliser
            normalisers[part] = normaliser
            # H = ln Z - E[logit]; a logit of -inf has probability 0 and adds nothing.
            probabilities = (logits - normaliser[:, None]).exp_()
            expected = torch.where(probabilities > 0, probabilities * logits, 0.0).sum(dim=-1)
            entropies[part] = normaliser - expected
        ctx.chunk = chunk
        ctx.save_for_backward(hidden, weight, bias, labels, temperatures, normalisers, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperatures, normalisers, entropies = ctx.saved_tensors
        for_logprobs, for_entropies = gradients
        hidden_gradient = torch.zeros_like(hidden)
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, labels.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _scaled_logits(hidden[part], weight, bias, temperatures[part])
            log_p = logits.sub_(normalisers[part, None])
            by_logits = _gradient_of_logits(
                log_p,
                labels[part],
                None if for_logprobs is None else for_logprobs[part],
                None if for_entropies is None else for_entropies[part],
                entropies[part],
            )
            by_logits = by_logits.div_(temperatures[part, None]).to(hidden.dtype)
            hidden_gradient[part] = by_logits @ weight
            weight_gradient += by_logits.T @ hidden[part]
            if bias_gradient is not None:
                bias_gradient += by_logits.sum(dim=0, dtype=torch.float32)
        return (
            hidden_gradient,
            weight_gradient.to(weight.dtype),
            None if bias_gradient is None or bias is None else bias_gradient.to(bias.dtype),
            None,
            None,
            None,
        )


def _gradient_of_logits(
    log_p: Tensor,
    labels: Tensor,
    for_logprobs: Tensor | None,
    for_entropies: Tensor | None,
    entropies: Tensor,
) -> Tensor:
    """[C, V]: d logprob = (onehot - p), d entropy = -p·(ln p + H), each times its own gradient."""
    probabilities = log_p.exp()
    gradient = torch.zeros_like(probabilities)
    if for_entropies is not None:
        inner = torch.where(probabilities > 0, log_p + entropies[:, None], 0.0)
        gradient -= probabilities * inner * for_entropies[:, None]
    if for_logprobs is not None:
        gradient -= probabilities.mul_(for_logprobs[:, None])
        gradient.scatter_add_(1, labels[:, None], for_logprobs[:, None])
    return gradient

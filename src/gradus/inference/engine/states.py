"""Gated delta nets in plain torch, for models that vLLM's kernels on CPUs do not take.

Between steps their states are in vLLM's cache, which is float32 in such a model.
Shapes: N tokens of a step, R requests, H heads with a state of V x K numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
)

_CHUNK_TOKENS = 64


class GatedDelta:
    """The convolution and the recurrence of one layer in one step.

    Requests that decode a token come first, then those that read a prompt.
    """

    def __init__(self, layer: Any, step: Any) -> None:
        self._layer, self._step = layer, step
        convolutions, self._states = layer.kv_cache
        is_by_channel = is_conv_state_dim_first()
        self._convolutions = convolutions if is_by_channel else convolutions.transpose(1, 2)
        self._weight = layer.conv1d.weight.squeeze(1)
        self._slots = step.non_spec_state_indices_tensor

    def write_to(self, output: Tensor, mixed: Tensor, a: Tensor, b: Tensor) -> None:
        """[N, H, V] from the convolution's inputs [N, ·] and the gates [N, H]."""
        num_decodes, num_tokens = self._step.num_decodes, self._step.num_actual_tokens
        rates = -self._layer.A_log.float().exp()
        decay = rates * functional.softplus(a.float() + self._layer.dt_bias.float())
        inputs = (mixed, decay, b.float().sigmoid())
        if num_decodes:
            output[:num_decodes] = self._decode(*(it[:num_decodes] for it in inputs))
        if num_tokens > num_decodes:
            read = slice(num_decodes, num_tokens)
            output[read] = self._read(*(it[read] for it in inputs))

    def _decode(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """A token of each request, all at once."""
        slots = self._slots[: len(mixed)]
        convolved = causal_conv1d_update_cpu(
            mixed.contiguous(),
            self._convolutions,
            self._weight,
            None,
            self._layer.activation,
            conv_state_indices=slots,
        )
        states = self._states[slots].float()
        found = decoded(*self._heads(convolved), decay, beta, states)
        self._states[slots] = states.to(self._states.dtype)
        return found

    def _read(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Prompts, or parts of prompts, one by one."""
        step, first = self._step, self._step.num_decodes
        requests = slice(first, first + step.num_prefills)
        starts = step.non_spec_query_start_loc[first : requests.stop + 1] - step.num_decode_tokens
        slots, is_begun = self._slots[requests], step.has_initial_state[requests]
        convolved = causal_conv1d_fn_cpu(
            mixed.T,
            self._weight,
            None,
            self._convolutions,
            starts,
            slots,
            is_begun,
            self._layer.activation,
        ).T
        lengths = starts.diff().tolist()
        inputs = [torch.split(it, lengths) for it in (*self._heads(convolved), decay, beta)]
        parts = []
        for number, (slot, begun) in enumerate(zip(slots.tolist(), is_begun.tolist(), strict=True)):
            kept = self._states[slot].float()
            state = kept if begun else torch.zeros_like(kept)
            query, key, value, rate, write = (it[number] for it in inputs)
            found, self._states[slot] = read(query, key, value, rate, write, state)
            parts.append(found)
        return torch.cat(parts)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [N, H, K] of length 1 and values [N, H, V]; heads share a key."""
        _, heads, size, key_size = self._states.shape
        width = (convolved.shape[1] - heads * size) // 2
        parts = torch.split(convolved.float(), [width, width, heads * size], dim=1)
        share = heads * key_size // width
        queries, keys = (
            _of_length_one(it.reshape(len(it), -1, key_size)).repeat_interleave(share, dim=1)
            for it in parts[:2]
        )
        return queries * key_size**-0.5, keys, parts[2].reshape(-1, heads, size)


def _of_length_one(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def decoded(
    queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> Tensor:
    """[R, H, V] of one token of each request; `states` [R, H, V, K] are changed in place."""
    states.mul_(decay.exp()[..., None, None])
    missing = values - torch.linalg.vecdot(states, keys[..., None, :])
    states.add_((missing * beta[..., None])[..., None] * keys[..., None, :])
    found: Tensor = torch.linalg.vecdot(states, queries[..., None, :])
    return found


def read(
    queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """[N, H, V] of a text that continues from a state [H, V, K], and the state after it.

    In chunks, within which what each token writes solves a triangular system.
    """
    parts = []
    by_head = (it.transpose(0, 1) for it in (queries, keys, values, decay, beta))
    chunks = (torch.split(it, _CHUNK_TOKENS, dim=1) for it in by_head)
    for query, key, value, rate, write in zip(*chunks, strict=True):
        passed = rate.cumsum(1)
        between = (passed[:, :, None] - passed[:, None, :]).exp().tril()
        since_start, to_end = passed.exp()[..., None], (passed[:, -1:] - passed).exp()[..., None]
        from_state = (key * since_start) @ state.mT
        written = torch.linalg.solve_triangular(
            (write[..., None] * (key @ key.mT) * between),
            write[..., None] * (value - from_state),
            upper=False,
            unitriangular=True,
        )
        parts.append((query * since_start) @ state.mT + (query @ key.mT * between) @ written)
        state = state * since_start[:, -1:] + written.mT @ (key * to_end)
    return torch.cat(parts, dim=1).transpose(0, 1), state

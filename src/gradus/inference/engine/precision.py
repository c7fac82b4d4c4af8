"""A child process that computes in bfloat16 with the engine's kernels, once: `plan/precision`.

Products, key-value cache and attention as vLLM chooses them for this processor: a prompt is read,
then three tokens, one at a time. Each has two forms, by the size of a weight and of a head.
Shapes: N tokens, H heads of D numbers, K of them with keys and values, E = H·D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from gradus.inference.settings import CPU_BLOCK_TOKENS
from gradus.plan.precision import end_trial

HEAD_SIZES = (64, 80, 256)
"""A multiple of 32 and one of 16, which have their own kernels; the last makes large weights."""
LARGEST_DISTANCE = 0.05
"""Of the result's norm. Each of four roundings to bfloat16 moves a number by 2^-9 of it at most,
0.3 % were measured; what is wrong is off by the norm itself."""
_HEADS, _KEY_HEADS = 4, 2
_PROMPT, _TOKENS = 40, 43


def fault() -> str:
    """Empty when the kernels compute in bfloat16 what plain float32 does."""
    torch.cpu._init_amx()
    current_platform.import_kernels()
    for size in HEAD_SIZES:
        exact = plain_layer(*made_up(size))
        distance = float((engine_layer(*made_up(size)).float() - exact).norm() / exact.norm())
        if not distance <= LARGEST_DISTANCE:
            return (
                f"computed other numbers than float32: {distance:.2g} of their norm away with "
                f"heads of {size}, where rounding explains {LARGEST_DISTANCE:g}"
            )
    return ""


def made_up(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """States [N, E] and weights [(H + 2K)·D, E], [E, E], all of them exact in bfloat16."""
    random = torch.Generator().manual_seed(size)
    width = _HEADS * size
    states = torch.randn(_TOKENS, width, generator=random)
    first = torch.randn((_HEADS + 2 * _KEY_HEADS) * size, width, generator=random) / width**0.5
    last = torch.randn(width, width, generator=random) / width**0.5
    return states.bfloat16(), first.bfloat16(), last.bfloat16()


def plain_layer(states: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """[N, E] in float32, by torch alone and all tokens at once."""
    queries, keys, values = (
        part.transpose(0, 1) for part in _parts(states.float() @ first.float().T)
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return mixed.transpose(0, 1).flatten(1) @ last.float().T


def engine_layer(states: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """[N, E] in the dtype of the states, by the engine's kernels, a prompt and then token by token.

    The cache is [blocks, K, 2·block, D], as vLLM lays it out: a block's keys, then its values.
    """
    size, dtype = states.shape[1] // _HEADS, states.dtype
    kernel = _get_attn_isa(dtype, CPU_BLOCK_TOKENS, size)
    blocks = torch.arange(-(-_TOKENS // CPU_BLOCK_TOKENS), dtype=torch.int32)[None]
    cache = torch.zeros(blocks.numel(), _KEY_HEADS, 2 * CPU_BLOCK_TOKENS, size, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    into_heads, out_of_heads = _product(first), _product(last)
    results = []
    for start, end in [(0, _PROMPT), *((n, n + 1) for n in range(_PROMPT, _TOKENS))]:
        queries, keys, values = _parts(into_heads(states[start:end]))
        slots = torch.arange(start, end)
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, kernel)
        rows = torch.tensor([0, end - start], dtype=torch.int32)
        lengths = torch.tensor([end], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            1, _HEADS, _KEY_HEADS, size, lengths, dtype, rows, True, -1, kernel, True
        )
        mixed = torch.empty_like(queries)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_cache,
            value_cache=value_cache,
            output=mixed,
            query_start_loc=rows,
            seq_lens=lengths,
            scale=size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=blocks,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        results.append(out_of_heads(mixed.flatten(1)))
    return torch.cat(results)


def _parts(joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, H, D], keys and values [N, K, D]."""
    size = joined.shape[1] // (_HEADS + 2 * _KEY_HEADS)
    counts = [_HEADS, _KEY_HEADS, _KEY_HEADS]
    heads = torch.split(joined.view(len(joined), -1, size), counts, dim=1)
    queries, keys, values = (part.contiguous() for part in heads)
    return queries, keys, values


def _product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """states @ weight.T by the kernel that vLLM chooses for a weight of this size."""
    outputs, inputs = weight.shape
    layer: Any = torch.nn.Linear(inputs, outputs, bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda states: layer.cpu_linear(states, layer.weight, None)


if __name__ == "__main__":
    end_trial(fault())

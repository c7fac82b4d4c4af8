"""Kernels of vLLM 0.31's build for CPUs that are missing or wrong, replaced before a model.

- Rotary positions are wrong for heads that stand in a dimension of their own (latent attention,
  LFM2): its kernel takes the last dimension for all heads. Can go when a test of
  `heads_in_one_row` fails without it.
- Convolutions are packed for a kernel that takes bfloat16 and 4 tokens alone; others stay as they
  are, and torch computes them.
- Gated delta nets take bfloat16 alone; others are computed by `states`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import _resolve_layer_name

from gradus.inference.engine.states import GatedDelta
from gradus.log import get_logger

logger = get_logger(__name__)
KERNEL_WIDTH = 4


def replace_kernels() -> None:
    """Let a model that is built from here on compute by what replaces vLLM's kernels."""
    if not hasattr(ops.rotary_embedding, "__wrapped__"):
        ops.rotary_embedding = heads_in_one_row(ops.rotary_embedding)
        ops.causal_conv1d_weight_pack = packed_where_taken(ops.causal_conv1d_weight_pack)
        gdn_attention.cpu_gdn_attention_core = _delta_core(gdn_attention.cpu_gdn_attention_core)


def heads_in_one_row(rotate: Any) -> Any:
    """vLLM's kernel, given queries and keys [N, heads · size] also where they are [N, heads, size].

    It writes into what it is given.
    """

    @functools.wraps(rotate)
    def rotate_rows(
        positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, *options: Any
    ) -> None:
        given = [it for it in (query, key) if it is not None]
        rows = [it.reshape(len(it), -1) for it in given]
        rotate(positions, rows[0], rows[1] if key is not None else None, head_size, *options)
        for tensor, row in zip(given, rows, strict=True):
            if tensor.data_ptr() != row.data_ptr():
                tensor.copy_(row.view_as(tensor))

    return rotate_rows


def packed_where_taken(pack: Any) -> Any:
    """vLLM's packing of [channels, width], which leaves [channels, 1, width] of other weights."""

    @functools.wraps(pack)
    def pack_or_keep(weight: Tensor) -> Tensor:
        if weight.dtype == torch.bfloat16 and weight.shape[-1] == KERNEL_WIDTH:
            packed: Tensor = pack(weight)
            return packed
        _say_once(str(weight.dtype).removeprefix("torch."), weight.shape[-1])
        return weight.unsqueeze(1)

    return pack_or_keep


@functools.cache
def _say_once(dtype: str, width: int) -> None:
    logger.info(
        "convolutions of %d tokens in %s, and gated delta nets after them: computed by torch, as "
        "vLLM has no kernels for them on CPUs",
        width,
        dtype,
    )


def _delta_core(kernel: Any) -> Any:
    def compute(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        layer: Any = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
        if mixed_qkv.dtype == torch.bfloat16:
            kernel(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            _by_torch(layer, mixed_qkv, b, a, core_attn_out)

    # vLLM registers it by its types, which it writes as text.
    compute.__signature__ = inspect.signature(kernel, eval_str=True)  # type: ignore[attr-defined]
    return compute


def _by_torch(layer: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
    steps = get_forward_context().attn_metadata
    if isinstance(steps, dict) and layer.prefix in steps:
        GatedDelta(layer, steps[layer.prefix]).write_to(core_attn_out, mixed_qkv, a, b)

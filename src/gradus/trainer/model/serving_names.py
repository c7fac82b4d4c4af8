"""Trained parameters under the names and in the dtype in which an engine loads them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from gradus.trainer.model.lora import adapted_layers, is_adapter_tensor


def serving_tensors(
    model: PreTrainedModel, dtype: torch.dtype, *, keep: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and saved buffer, whole and on the CPU, as `save_pretrained` names them.

    A collective: all ranks must exhaust it. Ranks with `keep` false take part and yield nothing.
    Tied parameters come once, under the name that Hugging Face keeps; adapters are added to the
    weights that they stand beside.
    """
    gathered = _whole_tensors(model, dtype, keep=keep)
    if not getattr(model, "_weight_conversions", None):
        yield from gathered
        return
    # Some architectures fuse tensors when loading; undoing that needs all of them together.
    state = dict(gathered)
    if keep:
        yield from revert_weight_conversion(model, state).items()


def _whole_tensors(
    model: PreTrainedModel, dtype: torch.dtype, *, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    tied = set(model.all_tied_weights_keys)
    adapted = adapted_layers(model)
    buffers = {name for name, _ in model.named_buffers()}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in tied or is_adapter_tensor(name):
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        layer = adapted.get(name.removesuffix(".weight"))
        if layer is not None and name.endswith(".weight"):
            whole = whole.float() + layer.delta()
        if keep:
            # The trainer computes with buffers as they are, and with rounded parameters.
            is_rounded = whole.is_floating_point() and name not in buffers
            kind = dtype if is_rounded else whole.dtype
            yield name, whole.detach().to(device="cpu", dtype=kind).contiguous()

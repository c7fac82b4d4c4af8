"""Decoder layers made to keep fewer activations, or compiled; in place, names stay as they are.

Both replace a layer's `forward` only. FSDP's hooks run around it, so a layer that is computed
again in backward finds its weights gathered.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from gradus.errors import ConfigError
from gradus.plan.machine import compiler_problem
from gradus.trainer.images.tower import text_part
from gradus.trainer.model.attention import keep_from_compiler
from gradus.trainer.model.cpu.states import state_mixers

Recompute = Literal["none", "selective", "full"]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_KEPT = (
    "torch_attn::_varlen_attn",
    "aten::_flash_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    # Context parallelism: a transfer costs more than keeping what it brought.
    "_c10d_functional::all_to_all_single",
)
"""Results that take long to compute and little memory to keep."""


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that transformers never splits, but not those of a tower for images; they run one
    after the other."""
    names = set(model._no_split_modules or ())
    # FSDP derives a class from the module's; the original follows in the method resolution order.
    return [
        module
        for module in text_part(model).modules()
        if any(kind.__name__ in names for kind in type(module).__mro__)
    ]


def recompute_layers(layers: Sequence[torch.nn.Module], mode: Recompute) -> None:
    """Let backward compute activations again.

    `full` keeps only each layer's input; `selective` keeps attention and every second matrix
    product besides, of a compiled layer only attention.
    """
    if mode == "none":
        return
    # Nothing random runs in a layer: the policy is trained without dropout.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, **options)


def compile_layers(
    layers: Sequence[torch.nn.Module], *, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile what comes before and after attention in each layer, for any number of tokens;
    what carries state stays as it is, for its rectangles differ as rows do.

    Goes before `recompute_layers`, which then runs compiled code again in backward. ConfigError
    when this machine has no C compiler, which torch needs for CPUs and GPUs alike.
    """
    if backend == "inductor" and (problem := compiler_problem(os.environ)):
        raise ConfigError(f"parallel.compile: {problem}")
    keep_from_compiler()
    for layer in layers:
        for mixer in state_mixers(layer):
            mixer.forward = torch.compiler.disable(mixer.forward)  # type: ignore[no-untyped-call]
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def _selective_contexts() -> tuple[Any, Any]:
    forward, again = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        _build_policy()
    )
    return forward, again


def _build_policy() -> Callable[..., CheckpointPolicy]:
    """Decides about each result of one layer, in the forward and again in backward."""
    products: Counter[bool] = Counter()
    kept = {operator for name in _KEPT if (operator := _operator(name)) is not None}

    def decide(
        context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        if operator in kept:
            return CheckpointPolicy.MUST_SAVE
        if operator in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _operator(name: str) -> Any:
    """An operator of torch by its full name; None when this build of torch has none."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return None if packet is None else packet.default

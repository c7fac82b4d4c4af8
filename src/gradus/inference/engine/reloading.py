"""Reloading a model in vLLM 0.31 so that no layer keeps its old weights.

vLLM puts tensors without storage in the place of all parameters and counts what passes through
their loaders. What a model copies into them itself is lost without a word, and the layer keeps the
weights that it had: experts and sinks of gpt-oss. Can go when vLLM refuses such a reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer

_COPIED_INTO = frozenset({"GptOssRoutedExperts", "OAIAttention"})
"""Layers of which vLLM's models load no parameter by its loader."""
_HEAD_METHOD = "UnquantizedEmbeddingMethod"

Tensors = Iterable[tuple[str, torch.Tensor]]


@contextmanager
def whole_reload(model: Any) -> Iterator[None]:
    """While open, `model.load_weights` fills every layer; RuntimeError names those that it did not.

    Of layers that are copied into, a second copy lies in memory until all are filled.
    """
    load = model.load_weights

    def load_whole(weights: Tensors) -> Any:
        copied = [it for it in model.modules() if type(it).__name__ in _COPIED_INTO]
        for layer in copied:
            materialize_layer(layer, layerwise.get_layerwise_info(layer))
            for parameter in layer.parameters(recurse=False):
                parameter.data.fill_(torch.nan)
        loaded = load(weights)
        for layer in copied:
            if not any(it.isnan().any() for it in layer.parameters(recurse=False)):
                layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))
        if left := layers_left(model):
            raise RuntimeError(
                f"vLLM loads no new weights into {', '.join(left)} of this model, which would go "
                "on with the old ones"
            )
        return loaded

    model.load_weights = load_whole
    try:
        yield
    finally:
        del model.load_weights


def layers_left(model: torch.nn.Module) -> list[str]:
    """Kinds of layers with parameters of which none was loaded, between the two ends of a reload.

    A parameter that another layer shares is loaded with that one's, and those of attention are made
    from others at the end.
    """
    loaded: set[int] = set()
    waiting = []
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        own = info.kernel_tensors[0] if info.kernel_tensors else layer._parameters
        numbers = {id(parameter) for parameter in own.values() if parameter is not None}
        if is_deferred_attention_layer(layer):
            continue
        if info.can_load() and info.load_numel == 0:
            waiting.append((type(layer).__name__, numbers))
        else:
            loaded |= numbers
    return sorted({name for name, numbers in waiting if numbers - loaded})


def pack_heads_again(model: torch.nn.Module) -> int:
    """Bring heads into the format of vLLM's CPU kernel again; how many layers that were.

    A head that shares the embedding's weight is not loaded itself, so vLLM leaves the packed copy
    that it made of the first weights.
    """
    packed: list[Any] = [it for it in model.modules() if hasattr(it, "cpu_linear")]
    heads = [it for it in packed if type(it.quant_method).__name__ == _HEAD_METHOD]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
    return len(heads)


def copy_convolutions_again(model: torch.nn.Module) -> int:
    """Give mixers of Mamba-2 their new convolutions; how many that were.

    They compute with a view that they took before vLLM packed the weight for its CPU kernel, and
    which nothing loads.
    """
    mixers: list[Any] = [it for it in model.modules() if hasattr(it, "conv_weights")]
    packed = [it for it in mixers if hasattr(it.conv1d, "_cpu_unpacked_conv_weight")]
    for mixer in packed:
        mixer.conv_weights.copy_(mixer.conv1d._cpu_unpacked_conv_weight)
    return len(packed)

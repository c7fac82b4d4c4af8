"""A reload of vLLM fills every layer or says which it did not; toy layers, vLLM's own code."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.attention.backend import AttentionBackend

from gradus.inference.engine.reloading import (
    copy_convolutions_again,
    pack_heads_again,
    whole_reload,
)

pytestmark = pytest.mark.torch


class OAIAttention(torch.nn.Module):
    """Bears the name of vLLM's class, whose model copies into the sinks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(2), requires_grad=False)


class Toy(torch.nn.Module):
    """Loads `norm` by its loader, and copies into `attention`, as vLLM's gpt-oss does."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(2, bias=False)
        self.norm.weight.requires_grad_(False)
        self.attention = attention
        layerwise.record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        found = dict(weights)
        loader = getattr(self.norm.weight, "weight_loader", default_weight_loader)
        loader(self.norm.weight, found["norm"])
        if "sinks" in found:
            self.attention.sinks.data.copy_(found["sinks"])  # type: ignore[operator, union-attr]
        return set(found)


def reload(model: Toy, **tensors: Tensor) -> None:
    """As vLLM's runner does it."""
    layerwise.initialize_layerwise_reload(model)
    model.load_weights(tensors.items())
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))


NEW = {"norm": torch.full((2,), 3.0), "sinks": torch.full((2,), 5.0)}


def test_vllm_alone_loses_what_a_model_copies_into_its_layers() -> None:
    """Once this fails, `whole_reload` can go."""
    model = Toy(OAIAttention())
    reload(model, **NEW)
    assert (model.norm.weight.tolist(), model.attention.sinks.tolist()) == ([3, 3], [0, 0])


def test_layers_that_are_copied_into_are_loaded_as_well_and_again() -> None:
    model = Toy(OAIAttention())
    sinks = model.attention.sinks
    for factor in (1, 2):
        with whole_reload(model):
            reload(model, **{name: factor * it for name, it in NEW.items()})
        assert model.norm.weight.tolist() == [3 * factor] * 2
        assert model.attention.sinks is sinks, "others hold it"
        assert sinks.tolist() == [5 * factor] * 2


class Other(OAIAttention):
    """A layer of which nobody knows that it is copied into."""


@pytest.mark.parametrize(
    ("attention", "tensors"), [(Other(), NEW), (OAIAttention(), {"norm": NEW["norm"]})]
)
def test_a_layer_that_would_keep_its_old_weights_is_named(
    attention: torch.nn.Module, tensors: dict[str, Tensor]
) -> None:
    with (
        pytest.raises(RuntimeError, match=f"no new weights into {type(attention).__name__} of"),
        whole_reload(model := Toy(attention)),
    ):
        reload(model, **tensors)


class Latent(torch.nn.Module, AttentionLayerBase):
    """Attention whose parameter is made from the weights of others once these are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.absorbed = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.times_made = 0

    def process_weights_after_loading(self, _: object) -> None:
        self.absorbed = torch.nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.times_made += 1

    def get_attn_backend(self) -> type[AttentionBackend]:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        raise NotImplementedError


def test_attention_that_is_made_from_loaded_weights_is_none_that_keeps_its_old_ones() -> None:
    model = Toy(Latent())
    for times in (1, 2):
        with whole_reload(model):
            reload(model, norm=NEW["norm"])
        assert model.attention.absorbed.tolist() == [7, 7]  # type: ignore[operator, union-attr]
        assert model.attention.times_made == times


def test_a_weight_that_another_layer_shares_is_loaded_with_that_one() -> None:
    tied = torch.nn.LayerNorm(2, bias=False)
    model = Toy(tied)
    tied.weight = model.norm.weight
    with whole_reload(model):
        reload(model, norm=NEW["norm"])
    assert tied.weight.tolist() == [3, 3]


class UnquantizedEmbeddingMethod:
    """Bears the name of vLLM's class; packs by keeping a copy."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = layer.weight.clone()  # type: ignore[operator, union-attr]


def test_a_head_that_shares_the_embedding_is_packed_again() -> None:
    head = torch.nn.Linear(2, 2)
    head.quant_method = UnquantizedEmbeddingMethod()
    head.quant_method.process_weights_after_loading(head)
    head.weight.data.fill_(7.0)
    assert pack_heads_again(torch.nn.Sequential(head, torch.nn.Linear(2, 2))) == 1
    assert torch.equal(head.cpu_linear, head.weight)


def mixer(*, is_packed: bool) -> torch.nn.Module:
    """As vLLM leaves a mixer of Mamba-2: what it computes with, and its convolution."""
    layer = torch.nn.Module()
    layer.conv1d = torch.nn.Module()
    layer.conv_weights = torch.zeros(2, 4)
    if is_packed:
        layer.conv1d._cpu_unpacked_conv_weight = torch.ones(2, 4)
    return layer


def test_a_packed_convolution_is_copied_to_where_it_is_computed() -> None:
    packed, plain = mixer(is_packed=True), mixer(is_packed=False)
    assert copy_convolutions_again(torch.nn.Sequential(packed, plain, torch.nn.Linear(2, 2))) == 1
    assert (packed.conv_weights.sum(), plain.conv_weights.sum()) == (8, 0)  # type: ignore[operator, union-attr]

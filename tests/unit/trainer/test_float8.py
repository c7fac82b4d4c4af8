"""Which layers multiply in float8, and who is refused; the arithmetic itself is torchao's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_stand_in import HOPPER

from gradus.errors import ConfigError
from gradus.trainer.model.gpu.torchao import use_float8
from gradus.trainer.model.kernels import DeviceFacts, multiplies_float8
from gradus.trainer.model.lora import LoraLinear

pytestmark = pytest.mark.torch


def library(configs: list[Any]) -> Any:
    """Asks about every module as torchao does, and leaves it as it is."""

    def convert(
        layer: torch.nn.Module,
        *,
        module_filter_fn: Callable[[torch.nn.Module, str], bool],
        config: Any,
    ) -> None:
        configs.append(config)
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                module_filter_fn(module, name)

    return SimpleNamespace(Float8LinearConfig=SimpleNamespace, convert_to_float8_training=convert)


def layer_of(**parts: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict(parts)


def test_linear_layers_whose_sizes_fit_are_chosen() -> None:
    linear = torch.nn.Linear
    layer = layer_of(
        q_proj=linear(32, 48),
        narrow=linear(32, 40),
        gate=linear(32, 16),
        gate_proj=linear(32, 64),
        adapted=LoraLinear(linear(32, 32), rank=2, alpha=4),
        norm=torch.nn.LayerNorm(32),
    )
    configs: list[Any] = []
    assert use_float8([layer], HOPPER, library(configs)) == ["q_proj", "gate_proj"]
    # A micro batch has any number of tokens, the kernels want multiples of 16.
    assert configs[0].pad_inner_dim


def test_a_model_without_such_a_layer_is_refused() -> None:
    layer = layer_of(q_proj=torch.nn.Linear(12, 12))
    with pytest.raises(ConfigError, match="no linear layer of this model has sizes in steps of 16"):
        use_float8([layer], HOPPER, library([]))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (DeviceFacts("cpu"), "a CPU does not multiply float8"),
        (replace(HOPPER, capability=(8, 0)), "capability 8.0 does not multiply float8"),
    ],
)
def test_a_device_without_its_arithmetic_is_refused(facts: DeviceFacts, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        use_float8([layer_of(q_proj=torch.nn.Linear(32, 32))], facts, library([]))


def test_ada_hopper_and_later_have_it() -> None:
    assert multiplies_float8(replace(HOPPER, capability=(8, 9)))
    assert multiplies_float8(replace(HOPPER, capability=(12, 0)))


@pytest.mark.skipif(find_spec("torchao") is not None, reason="it is installed")
def test_without_the_package_the_refusal_names_it() -> None:
    with pytest.raises(ConfigError, match=r"gradus-rl\[float8\]"):
        use_float8([layer_of(q_proj=torch.nn.Linear(32, 32))], HOPPER)

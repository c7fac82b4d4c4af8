"""Low-rank adapters: y = W x + (alpha / rank) B A x, with W frozen (Hu et al., arXiv:2106.09685).

Our own layers, in the format of PEFT on disk. A layer stays a linear layer with the same weight
under the same name, so that FSDP, the serving names and checkpoints of the base do not change.
Shapes: W [out, in], A [rank, in], B [out, rank].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from gradus.config import LoraConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.run.model_files import model_digest
from gradus.trainer.distributed import Place, on_cpu, whole_tensor
from gradus.weights.published import BASE_FILE

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"
"""PEFT's names of an adapter's files; the second without its suffix."""

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Linear layers that choose experts; adapted only when they are named."""


class LoraLinear(torch.nn.Linear):
    """A frozen linear layer with a trained adapter.

    >>> layer = LoraLinear(torch.nn.Linear(4, 3), rank=2, alpha=4)
    >>> sorted(name for name, p in layer.named_parameters() if p.requires_grad)
    ['lora_A', 'lora_B']
    """

    def __init__(self, base: torch.nn.Linear, *, rank: int, alpha: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.bias = base.bias
        self.scale = alpha / rank
        self.is_on = True
        """When off, the layer is the frozen one."""
        # An adapter is not in the model's files: it has values even while the model is an outline.
        device = torch.device("cpu") if base.weight.is_meta else base.weight.device
        # As PEFT starts: A random, B zero, so that the first policy is the base model.
        a = torch.empty(rank, base.in_features, dtype=torch.float32, device=device)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        self.lora_A = torch.nn.Parameter(a)
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        if not self.is_on:
            return functional.linear(input, self.weight, self.bias)
        low = functional.linear(functional.linear(input, self.lora_A), self.lora_B)
        return functional.linear(input, self.weight, self.bias) + self.scale * low

    def delta(self) -> Tensor:
        """What merging adds to W, float32 [out, in]; a collective."""
        product: Tensor = self.scale * (
            whole_tensor(self.lora_B).float() @ whole_tensor(self.lora_A).float()
        )
        return product.detach()


def add_adapters(model: PreTrainedModel, config: LoraConfig, compute_dtype: torch.dtype) -> None:
    """Freeze `model` and give every target layer an adapter, in place.

    ConfigError when a target names no linear layer.
    """
    freeze(model, compute_dtype)
    targets = _targets(model, config)
    for name in targets:
        owner_name, _, leaf = name.rpartition(".")
        owner, base = model.get_submodule(owner_name), model.get_submodule(name)
        assert isinstance(base, torch.nn.Linear)
        setattr(owner, leaf, LoraLinear(base, rank=config.rank, alpha=config.alpha))


def freeze(model: torch.nn.Module, compute_dtype: torch.dtype) -> None:
    """Keep frozen weights in the compute dtype: they need no float32 master."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(compute_dtype)


def adapted_layers(model: torch.nn.Module) -> dict[str, LoraLinear]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)
    }


def is_adapter_tensor(name: str) -> bool:
    """Whether a state dict entry belongs to an adapter, not to the base model."""
    return name.endswith((".lora_A", ".lora_B"))


def adapter_tensors(
    model: PreTrainedModel, dtype: torch.dtype, *, keep: bool = True, place: Place = on_cpu
) -> Iterator[tuple[str, Tensor]]:
    """Every adapter factor, whole, under PEFT's names.

    A collective: all ranks must exhaust it. Ranks with `keep` false take part and yield nothing.
    """
    for name, layer in adapted_layers(model).items():
        for factor in ("lora_A", "lora_B"):
            whole = whole_tensor(getattr(layer, factor))
            if keep:
                full_name = f"base_model.model.{name}.{factor}.weight"
                yield full_name, place(full_name, whole, dtype)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Fill the adapters of `model` from the files that `adapter_tensors` went into."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{ADAPTER_STEM}*.safetensors")):
        stored |= load_file(path)
    for name, layer in adapted_layers(model).items():
        for factor in ("lora_A", "lora_B"):
            full_name = f"base_model.model.{name}.{factor}.weight"
            if full_name not in stored:
                raise CorruptStateError(f"{folder} has no tensor {full_name}")
            getattr(layer, factor).data.copy_(stored[full_name])


def base_digest(model: PreTrainedModel) -> str:
    """SHA-256 of the files from which the frozen weights came; reads all of them."""
    name = model.config.name_or_path
    assert name, "the model was not loaded from files"
    config = cached_file(name, "config.json", local_files_only=True)
    assert config is not None, "cached_file raises for a required file"
    return model_digest(Path(config).parent)


def adapter_files(
    model: PreTrainedModel, config: LoraConfig, base_model: str, base_sha256: str | None
) -> dict[str, bytes]:
    """The files of an adapter's directory except its tensors: PEFT's config and the base's digest.

    `base_model` is the base's name or path; ranks that write no files pass no digest. vLLM
    fuses q, k, v and gate, up itself: it wants PEFT's separate names.
    """
    leaves = sorted({name.rpartition(".")[2] for name in adapted_layers(model)})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": leaves,
    }
    return {
        ADAPTER_CONFIG: json.dumps(settings, indent=1).encode(),
        BASE_FILE: json.dumps({"sha256": base_sha256}).encode(),
    }


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the linear layers to adapt, inside decoder layers only."""
    blocks = set(model._no_split_modules or ())
    linear = [
        f"{block}.{name}"
        for block, layer in model.named_modules()
        if type(layer).__name__ in blocks
        for name, module in layer.named_modules()
        if type(module) is torch.nn.Linear
    ]
    found = {name.rpartition(".")[2] for name in linear}
    wanted = found - ROUTERS if config.target_modules is None else set(config.target_modules)
    unknown = sorted(wanted - found)
    if unknown or not wanted:
        raise ConfigError(
            f"lora.target_modules: no linear layer is named {unknown or 'anything'}; "
            f"this model has {', '.join(sorted(found)) or 'none'}"
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]

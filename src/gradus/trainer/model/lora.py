"""Low-rank adapters: y = W x + (alpha / rank) B A x, with W frozen (Hu et al., arXiv:2106.09685).

Our own layers, in the format of PEFT on disk. A layer stays a linear layer with the same weight
under the same name, so that FSDP, the serving names and checkpoints of the base do not change.
Shapes: W [out, in], A [rank, in], B [out, rank]; of experts one of each, stacked, E in front.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear
from transformers.utils.hub import cached_file

from gradus.config import LoraConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.run.model_files import model_digest
from gradus.trainer.distributed import Place, local_tensor, on_cpu, whole_tensor
from gradus.trainer.model.experts.products import FACTORS
from gradus.trainer.model.layers import decoder_layers
from gradus.weights.published import BASE_FILE

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"
"""PEFT's names of an adapter's files; the second without its suffix."""

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Linear layers that choose experts; adapted only when they are named."""

EXPERTS = "experts"
"""What names all experts of a mixture as a target."""
_READ_AS_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Modules that PEFT takes for experts, in a model that has some, unless their weights are named."""
_ALIGNED = 8
"""Ranks that the grouped product takes are multiples of this; others are padded."""


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

    def merged(self, weight: Tensor) -> Tensor:
        """The whole W with the adapter added, in float32; a collective."""
        a, b = whole_tensor(self.lora_A).float(), whole_tensor(self.lora_B).float()
        return torch.addmm(weight.float(), b, a, alpha=self.scale).detach()


class LoraExperts(torch.nn.Module):
    """The trained factors beside one frozen weight that stacks those of all experts.

    >>> factors = LoraExperts(torch.empty(8, 6, 4), is_transposed=False, rank=2, alpha=4)
    >>> factors.lora_A.shape, factors.lora_B.shape
    (torch.Size([8, 2, 4]), torch.Size([8, 6, 2]))
    """

    def __init__(self, weight: Tensor, *, is_transposed: bool, rank: int, alpha: int) -> None:
        """`is_transposed` says that the weight is stored as [E, in, out]."""
        super().__init__()
        experts, outputs, inputs = weight.shape
        if is_transposed:
            outputs, inputs = inputs, outputs
        self._is_transposed = is_transposed
        self.scale = alpha / rank
        self.is_on = True
        self.is_turned = False
        """True if PEFT takes inputs for outputs: its factors are then ours the other way round."""
        device = torch.device("cpu") if weight.is_meta else weight.device
        a = torch.empty(experts, rank, inputs, dtype=torch.float32, device=device)
        # Each expert starts as a layer of its own would.
        for each in a:
            torch.nn.init.kaiming_uniform_(each, a=math.sqrt(5))
        self.lora_A = torch.nn.Parameter(a)
        self.lora_B = torch.nn.Parameter(torch.zeros(experts, outputs, rank, device=device))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What the adapters add to rows [S, in] that are sorted by expert: [S, out]. Those of each
        expert end at `ends` [E]."""
        # Zeros beside the factors change nothing, and rows of the product must begin at 16 bytes.
        missing = -self.lora_A.shape[1] % _ALIGNED
        a = functional.pad(local_tensor(self.lora_A), (0, 0, 0, missing))
        b = functional.pad(local_tensor(self.lora_B), (0, missing))
        low: Tensor = self.scale * _grouped_linear(_grouped_linear(rows, a, ends), b, ends)
        return low

    def merged(self, weight: Tensor) -> Tensor:
        """The whole stack with the adapters added, in float32; a collective."""
        a, b = whole_tensor(self.lora_A).float(), whole_tensor(self.lora_B).float()
        left, right = (a.mT, b.mT) if self._is_transposed else (b, a)
        return torch.baddbmm(weight.float(), left, right, alpha=self.scale).detach()


Adapter = LoraLinear | LoraExperts


def add_adapters(model: PreTrainedModel, config: LoraConfig, compute_dtype: torch.dtype) -> None:
    """Freeze `model` and give every target an adapter, in place.

    ConfigError when a target names no linear layer, and no experts that can be adapted.
    """
    freeze(model.parameters(), compute_dtype)
    targets = _targets(model, config)
    options = {"rank": config.rank, "alpha": config.alpha}
    for name in targets:
        owner_name, _, leaf = name.rpartition(".")
        owner, base = model.get_submodule(owner_name), model.get_submodule(name)
        if isinstance(base, torch.nn.Linear):
            setattr(owner, leaf, LoraLinear(base, **options))
            continue
        found: Any = base
        factors = {
            stack: LoraExperts(getattr(base, stack), is_transposed=found.is_transposed, **options)
            for stack in _stacks(base)
        }
        for it in factors.values():
            it.is_turned = getattr(base, "is_turned_in_peft", False)
        base.add_module(FACTORS, torch.nn.ModuleDict(factors))


def _stacks(experts: torch.nn.Module) -> tuple[str, str]:
    """Names of the stacked weights of experts: what comes before the activation, and after."""
    return ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"), "down_proj"


def _is_experts(module: torch.nn.Module) -> bool:
    """Tell whether transformers computes the module by its interface of experts."""
    return hasattr(module, "is_transposed") and hasattr(module, _stacks(module)[0])


def freeze(parameters: Iterable[torch.nn.Parameter], compute_dtype: torch.dtype) -> None:
    """Keep frozen weights in the compute dtype: they need no float32 master."""
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(compute_dtype)


def adapted_layers(model: torch.nn.Module) -> dict[str, Adapter]:
    """Every adapter, by the name of its linear layer, or of its stacked weight."""
    return {
        name.replace(f".{FACTORS}.", "."): module
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    }


def is_adapter_tensor(name: str) -> bool:
    """Tell whether a state dict entry belongs to an adapter, not to the base model."""
    return name.endswith((".lora_A", ".lora_B"))


def adapter_tensors(
    model: PreTrainedModel, dtype: torch.dtype, *, keep: bool = True, place: Place = on_cpu
) -> Iterator[tuple[str, Tensor]]:
    """Every adapter factor, whole, under PEFT's names.

    A collective: all ranks must exhaust it. Ranks with `keep` false take part and yield nothing.
    """
    for name, layer in adapted_layers(model).items():
        for factor in ("lora_A", "lora_B"):
            own, is_turned = _own_factor(layer, factor)
            whole = whole_tensor(own)
            whole = _flat(whole.mT if is_turned else whole, factor)
            if keep:
                full_name = f"{_peft_name(name, layer)}.{factor}.weight"
                yield full_name, place(full_name, whole, dtype)


def _peft_name(name: str, layer: Adapter) -> str:
    """PEFT wraps experts once for each of their weights, the last outermost."""
    if isinstance(layer, LoraExperts):
        owner, _, leaf = name.rpartition(".")
        name = owner if leaf == "down_proj" else f"{owner}.base_layer"
    return f"base_model.model.{name}"


def _own_factor(layer: Adapter, name: str) -> tuple[torch.nn.Parameter, bool]:
    """What PEFT stores under a name, and whether it is the other way round."""
    if not isinstance(layer, LoraExperts) or not layer.is_turned:
        return getattr(layer, name), False
    return (layer.lora_B if name == "lora_A" else layer.lora_A), True


def _flat(factor: Tensor, name: str) -> Tensor:
    """As PEFT stores it: [E · rank, in], and [out, rank · E] with the experts innermost."""
    if factor.ndim == 2:
        return factor
    return factor.flatten(0, 1) if name == "lora_A" else factor.permute(1, 2, 0).flatten(1)


def _stacked(stored: Tensor, like: Tensor, name: str) -> Tensor:
    """What `_flat` made of a factor, in the shape of `like`."""
    if like.ndim == 2 or name == "lora_A":
        return stored.view(like.shape)
    experts, outputs, rank = like.shape
    return stored.view(outputs, rank, experts).permute(2, 0, 1)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Fill the adapters of `model` from the files that `adapter_tensors` went into."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{ADAPTER_STEM}*.safetensors")):
        stored |= load_file(path)
    for name, layer in adapted_layers(model).items():
        for factor in ("lora_A", "lora_B"):
            full_name = f"{_peft_name(name, layer)}.{factor}.weight"
            if full_name not in stored:
                raise CorruptStateError(f"{folder} has no tensor {full_name}")
            parameter, is_turned = _own_factor(layer, factor)
            own = parameter.data.mT if is_turned else parameter.data
            own.copy_(_stacked(stored[full_name], own, factor))


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
    kinds = {(name.rpartition(".")[2], type(it)) for name, it in adapted_layers(model).items()}
    by_weight = {f"{EXPERTS}.{leaf}" for leaf, kind in kinds if kind is LoraExperts}
    leaves = {leaf for leaf, kind in kinds if kind is LoraLinear}
    if any(_is_experts(module) for module in model.modules()):
        by_weight |= {f"{name}.weight" for name in leaves & _READ_AS_EXPERTS}
        leaves -= _READ_AS_EXPERTS
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
        "target_modules": sorted(leaves),
        "target_parameters": sorted(by_weight) or None,
    }
    return {
        ADAPTER_CONFIG: json.dumps(settings, indent=1).encode(),
        BASE_FILE: json.dumps({"sha256": base_sha256}).encode(),
    }


def adapter_config(settings: Any) -> LoraConfig:
    """What `adapter_files` has written, as a config; KeyError or TypeError where it is not that."""
    # `experts.down_proj` is of experts, `down_proj.weight` of a linear layer.
    by_weight = {target.partition(".")[0] for target in settings.get("target_parameters") or ()}
    return LoraConfig(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        target_modules=sorted({*settings["target_modules"], *by_weight}),
    )


def _is_routing(name: str) -> bool:
    """Whether a layer is a part of a router that has others, so that its own name does not say."""
    return name.rpartition(".")[0].rpartition(".")[2] in ROUTERS


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the linear layers and experts to adapt, inside decoder layers only."""
    blocks = set(decoder_layers(model))
    found = {
        f"{block}.{name}": EXPERTS if _is_experts(module) else name.rpartition(".")[2]
        for block, layer in model.named_modules()
        if layer in blocks
        for name, module in layer.named_modules()
        if (type(module) is torch.nn.Linear and not _is_routing(name)) or _is_experts(module)
    }
    leaves = set(found.values())
    default = leaves - ROUTERS - {EXPERTS}
    wanted = default if config.target_modules is None else set(config.target_modules)
    unknown = sorted(wanted - leaves)
    if unknown or not wanted:
        raise ConfigError(
            f"lora.target_modules: no linear layer is named {unknown or 'anything'}; "
            f"this model has {', '.join(sorted(leaves)) or 'none'}"
        )
    return [name for name, leaf in found.items() if leaf in wanted]

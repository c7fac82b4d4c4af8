"""What a mixture's experts compute, by grouped matrix products; on one rank or split over ranks.

transformers asks its registry for this form, as it does for attention. Where experts are split
each rank computes those that it owns for the tokens of all: an all-to-all
brings rows to their experts and another one brings them back. Shapes: T tokens, k experts of a
token, E experts, R rows, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _grouped_linear,
    grouped_mm_experts_forward,
)

from gradus.errors import ConfigError
from gradus.trainer.distributed import local_tensor, whole_tensor
from gradus.trainer.model.experts.groups import Groups

EXPERTS_NAME = "gradus_grouped"
OWN_EXPERTS_NAME = "gradus_own"
"""transformers' own form, for which split experts are gathered."""
FACTORS = "lora"
"""Under which experts keep the adapters of their stacked weights."""
_GPU_ROWS = 16
"""Rows of a group on GPUs, or a multiple of it; torch's kernel has hung on empty groups."""


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that own the experts of a layer together, seen from one of them."""

    rank: int
    size: int
    group: dist.ProcessGroup


def expert_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of a model that hold experts as tensors [E, ...] and ask the registry."""
    names = ("has_gate", "has_bias", "is_transposed", "num_experts")
    return [module for module in model.modules() if all(hasattr(module, name) for name in names)]


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, H], from hidden states, the experts chosen for them [T, k] and their weights [T, k]."""
    ranks: ExpertRanks | None = getattr(module, "expert_ranks", None)
    if ranks is None:
        said = _computed(module, hidden, chosen, module.num_experts)
    else:
        said = _exchanged(module, hidden, chosen, ranks)
    return (said * weights[..., None]).sum(dim=1).to(hidden.dtype)


def _computed(module: Any, hidden: Tensor, chosen: Tensor, num_experts: int) -> Tensor:
    """[T, k, H] of the experts that this rank has."""
    groups = Groups.of(chosen, num_experts, _GPU_ROWS if hidden.is_cuda else 1)
    rows = groups.spread(hidden)
    if module.has_gate:
        rows = module._apply_gate(_product(module, "gate_up_proj", rows, groups))
    else:
        rows = module.act_fn(_product(module, "up_proj", rows, groups))
    return groups.collect(_product(module, "down_proj", rows, groups))


def _product(module: Any, name: str, rows: Tensor, groups: Groups) -> Tensor:
    """By a stacked weight, with its adapter where it has one."""
    weight, bias = local_tensor(getattr(module, name)), None
    if module.has_bias:
        numbers = torch.arange(len(rows), device=rows.device, dtype=groups.ends.dtype)
        expert = torch.searchsorted(groups.ends, numbers, right=True)
        bias = local_tensor(getattr(module, f"{name}_bias"))[expert]
    product: Tensor = _grouped_linear(rows, weight, groups.ends, bias, module.is_transposed)
    adapter = module.get_submodule(FACTORS)[name] if hasattr(module, FACTORS) else None
    return product if adapter is None or not adapter.is_on else product + adapter(rows, groups.ends)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _exchanged(module: Any, hidden: Tensor, chosen: Tensor, ranks: ExpertRanks) -> Tensor:
    """[T, k, H] by the experts of all ranks, which call this together.

    How many rows go where is read on the host, once.
    """
    own = module.num_experts // ranks.size
    sent = Groups.of(chosen, module.num_experts)
    counts = torch.diff(sent.ends, prepend=sent.ends.new_zeros(1))  # [E]
    received = all_to_all_single(counts, None, None, ranks.group)  # [ranks · own]
    both = torch.stack([counts, received]).view(2, ranks.size, own)
    going, coming = both.sum(dim=2).tolist()
    rows = all_to_all_single(sent.spread(hidden), coming, going, ranks.group)
    experts = torch.arange(own, device=hidden.device).repeat(ranks.size)
    asked = experts.repeat_interleave(received, output_size=len(rows))
    said = _computed(module, rows, asked[:, None], own)[:, 0]
    return sent.collect(all_to_all_single(said.contiguous(), going, coming, ranks.group))


def _own_experts(module: Any, *inputs: Tensor) -> Tensor:
    return with_whole_weights(module, partial(grouped_mm_experts_forward, module), *inputs)


def with_whole_weights(module: Any, own: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What `own` says while `module` holds the weights of all ranks, adapters merged."""
    parts, adapters = dict(module._parameters), getattr(module, FACTORS, {})
    whole = {name: whole_tensor(part) for name, part in parts.items()}
    for name, adapter in adapters.items():
        if adapter.is_on:
            whole[name] = adapter.merged(whole[name]).to(whole[name].dtype)
    module._parameters.update(whole)
    try:
        said = own(*inputs)
    finally:
        module._parameters.update(parts)
    return said


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, grouped_experts)
ALL_EXPERTS_FUNCTIONS.register(OWN_EXPERTS_NAME, _own_experts)


# Experts split over ranks, and what each rank keeps of them over others by FSDP.


def shard_experts(
    modules: Sequence[torch.nn.Module], mesh: DeviceMesh, options: Mapping[str, Any]
) -> None:
    """Leave each rank its part of the experts, in place; `options` are FSDP's.

    Over the last dimension of `mesh` each rank owns some experts, whose weights FSDP splits over
    the others. A gradient is then a sum over the tokens of as many ranks as own experts together,
    of which FSDP knows nothing: it is divided by them, to be an average over all ranks like others.
    ConfigError where there are no experts, or others than can be shared.
    """
    _refuse_misfit(modules, mesh.size(-1))
    # It warns of each tensor that is gathered over two dimensions.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    names = mesh.mesh_dim_names
    assert names is not None
    owners, rest = mesh[names[-1]], mesh[names[:-1]]
    ranks = ExpertRanks(owners.get_local_rank(), owners.size(), owners.get_group())

    def average(gradient: Tensor) -> None:
        gradient.div_(ranks.size)

    for module in modules:
        _split(module, owners)
        module.expert_ranks = ranks  # type: ignore[assignment]
        fully_shard(module, **{**options, "mesh": rest})
        assert isinstance(module, FSDPModule)
        module.set_all_reduce_hook(average)


def _refuse_misfit(modules: Sequence[Any], size: int) -> None:
    """As far as a config.json did not say it before anything started."""
    counts = {module.num_experts for module in modules} or {0}
    for count in counts:
        if count % size or not count:
            raise ConfigError(
                f"parallel.expert_parallel_size = {size}: the model has layers of {count} experts "
                "that can be split; choose a size that divides them, or 1"
            )


def _split(module: torch.nn.Module, owners: DeviceMesh) -> None:
    """Weights, biases and adapters alike: all are stacked."""
    for owner in module.modules():
        for name, whole in list(owner.named_parameters(recurse=False)):
            own = whole.detach().chunk(owners.size())[owners.get_local_rank()].clone()
            part = DTensor.from_local(own, owners, [Shard(0)], run_check=False)
            setattr(owner, name, torch.nn.Parameter(part, whole.requires_grad))

"""Parameters split over ranks by FSDP2: float32 masters, computing in the compute dtype."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradus.trainer.model.policy_model import PolicyModel


def shard_model(policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> PolicyModel:
    """Shard every decoder layer, then the rest, in place; gradients are reduced in float32.

    FSDP averages gradients over ranks; step.py multiplies its loss by their number, because its
    denominators already count all ranks.
    """
    # Inputs are not cast: temperatures and logprobs must stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in _decoder_layers(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def _decoder_layers(policy: PolicyModel) -> list[torch.nn.Module]:
    """The modules that transformers never splits; they run one after the other."""
    names = set(policy.model._no_split_modules or ())
    return [module for module in policy.modules() if type(module).__name__ in names]

"""Parameters split over ranks by FSDP2: float32 masters, computing in the compute dtype."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from gradus.config import ParallelConfig
from gradus.log import get_logger
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.layers import compile_layers, decoder_layers, recompute_layers
from gradus.trainer.model.policy_model import PolicyModel

logger = get_logger(__name__)

GradientSync = Literal["last", "each"]
"""After which micro batches of a step gradients are added up over ranks."""


def shard_model(
    policy: PolicyModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    parallel: ParallelConfig | None = None,
) -> PolicyModel:
    """Prepare and shard every decoder layer, then the rest, in place.

    Over the last dimension of `mesh` parameters are sharded, over the first of two they are
    copied. Gradients are reduced in float32. FSDP averages them over ranks; step.py multiplies its
    loss by their number, because its denominators already count all ranks.
    """
    choice = parallel or ParallelConfig()
    layers = decoder_layers(policy.model)
    if choice.compile:
        compile_layers(layers)
    elif mesh.device_type == "cpu":
        fuse_layers(policy.model)
    recompute_layers(layers, choice.activation_checkpointing)
    options: dict[str, Any] = {
        "mesh": mesh,
        # Inputs are not cast: temperatures and logprobs must stay float32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": _offload_policy(choice, mesh),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=choice.reshard_after_forward, **options)
    # The rest is used at both ends of the forward; FSDP keeps it gathered between them.
    fully_shard(policy, **options)
    return policy


def expect_backward(policy: object, *, is_last: bool, sync: GradientSync) -> None:
    """Say whether the next backward is the last of a step, after which gradients must be whole.

    Copies of the model are added up only then in any case: shards of gradients need no more
    memory than one micro batch does.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(is_last or sync == "each")
        policy.set_requires_all_reduce(is_last)


def release_gathered(policy: torch.nn.Module) -> None:
    """Give every parameter back to its shard, in float32.

    After a forward without a backward FSDP keeps what it gathered, in the compute dtype.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _offload_policy(parallel: ParallelConfig, mesh: DeviceMesh) -> OffloadPolicy:
    """FSDP's own offloading: shards live in pinned CPU memory, and so does what is made of them."""
    if not parallel.offload_optimizer:
        return OffloadPolicy()
    if mesh.device_type == "cpu":
        logger.warning("parallel.offload_optimizer does nothing here: all memory is the CPU's")
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=True)

"""Parameters split over ranks by FSDP2: float32 masters, computing in the compute dtype."""

from __future__ import annotations

from typing import Any

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
from gradus.trainer.model.experts.products import expert_modules, shard_experts
from gradus.trainer.model.gpu.offload import offload_inputs
from gradus.trainer.model.gpu.torchao import use_float8
from gradus.trainer.model.kernels import (
    DeviceFacts,
    GradientSync,
    Platform,
    compiles,
    fuses_layers,
    gradient_sync,
)
from gradus.trainer.model.layers import compile_layers, decoder_layers, recompute_layers
from gradus.trainer.model.policy_model import PolicyModel

logger = get_logger(__name__)


def shard_model(
    policy: PolicyModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    parallel: ParallelConfig | None = None,
    *,
    experts: DeviceMesh | None = None,
) -> PolicyModel:
    """Prepare and shard every decoder layer, then the rest, in place.

    Over the last dimension of `mesh` parameters are sharded, over the first of two they are
    copied; over the last of `experts` each rank gets its part of every layer's experts. Gradients
    are reduced in float32. FSDP averages them over ranks; step.py multiplies its loss by their
    number, because its denominators already count all ranks.
    """
    choice = parallel or ParallelConfig()
    layers = decoder_layers(policy.model)
    platform = policy.platform_on(torch.device(mesh.device_type))
    if choice.float8:
        use_float8(layers, platform.facts)
    is_compiled = compiles(platform.facts, choice.compile)
    if is_compiled:
        compile_layers(layers, backend=platform.compile_backend)
    elif platform.facts.kind == "cuda":
        policy.leave_uncompiled(platform)
    if fuses_layers(platform.facts, is_compiled=is_compiled):
        fuse_layers(policy.model)
    recompute_layers(layers, choice.activation_checkpointing)
    if choice.offload_activations and _can_offload(platform.facts, "activations"):
        offload_inputs(layers, platform.inputs)
    options: dict[str, Any] = {
        "mesh": mesh,
        # Inputs are not cast: temperatures and logprobs must stay float32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": _offload_policy(choice, platform.facts),
    }
    of_layers = options | {"reshard_after_forward": choice.reshard_after_forward}
    if experts is not None:
        shard_experts(expert_modules(policy), experts, of_layers)
    for layer in layers:
        fully_shard(layer, **of_layers)
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


def sync_on(device: torch.device, parallel: ParallelConfig) -> GradientSync:
    """After which micro batches the gradients of a policy on this device are added up."""
    return gradient_sync(Platform.of(device).facts, parallel.gradient_sync)


def _offload_policy(parallel: ParallelConfig, facts: DeviceFacts) -> OffloadPolicy:
    """FSDP's own offloading: shards live in pinned CPU memory, and so does what is made of them."""
    if parallel.offload_optimizer and _can_offload(facts, "optimizer"):
        return CPUOffloadPolicy(pin_memory=True)
    return OffloadPolicy()


def _can_offload(facts: DeviceFacts, what: str) -> bool:
    if facts.kind == "cpu":
        logger.warning("parallel.offload_%s does nothing here: all memory is the CPU's", what)
    return facts.kind != "cpu"

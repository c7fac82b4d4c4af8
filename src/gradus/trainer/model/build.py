"""The policy from its config to its shards: outlined, adapted, split over ranks, then filled.

No process ever holds the whole model in main memory; those of one machine read the same files, each
the rows that it owns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from gradus.config import ModelConfig, SftConfig, TrainerConfig
from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.plan.memory import footprint_of, read_model_shape
from gradus.run.model_files import model_folder
from gradus.trainer.distributed import World
from gradus.trainer.images.tower import tower_parameters, unused_parameters
from gradus.trainer.model.cpu.routing import Routers
from gradus.trainer.model.kernels import Platform
from gradus.trainer.model.load import outline_model
from gradus.trainer.model.lora import add_adapters, freeze
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.probe import refuse_inexact
from gradus.trainer.model.reference import Reference
from gradus.trainer.model.shard import shard_model

logger = get_logger(__name__)


def build_policy(
    base: ModelConfig,
    settings: TrainerConfig | SftConfig,
    world: World,
    compute_dtype: torch.dtype,
    *,
    is_resumed: bool = False,
    keeps_reference: bool = False,
    platform: Platform | None = None,
) -> PolicyModel:
    """The policy over all ranks, which call this together; ConfigError when packing changes it.

    `is_resumed` says that a checkpoint is read next: what it holds is not read from the model's
    files, and the caller asks `refuse_inexact` afterwards. `keeps_reference` counts the memory of
    what `build_reference` adds. `platform` is the device's own unless a
    test says otherwise.
    """
    refuse_too_large(base, settings, world, keeps_reference=keeps_reference)
    outline = outline_model(base, world.device)
    if settings.lora is not None:
        add_adapters(outline.model, settings.lora, compute_dtype)
    else:
        kept = unused_parameters if settings.train_vision else tower_parameters
        freeze(kept(outline.model), compute_dtype)
    is_replayed = isinstance(settings, TrainerConfig) and settings.router_replay == "engine"
    policy = PolicyModel(
        outline.model,
        world.context,
        platform=platform,
        routers=Routers.of(outline.model) if is_replayed else None,
    )
    shard_model(policy, world.mesh, compute_dtype, settings.parallel, experts=world.experts)
    outline.fill(policy, _place(settings, world), frozen_only=is_resumed)
    if not is_resumed:
        refuse_inexact(policy, world)
    return policy


def build_reference(
    policy: PolicyModel,
    base: ModelConfig,
    settings: TrainerConfig | SftConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> Reference:
    """The initial weights beside `policy`, over all ranks, which call this together.

    They are read from the model's files, after a resume too: a checkpoint holds other ones.
    """
    if settings.lora is not None:
        return Reference(policy, world.device)
    outline = outline_model(base, world.device)
    freeze(outline.model.parameters(), compute_dtype)
    frozen = PolicyModel(outline.model, world.context)
    shard_model(frozen, world.mesh, compute_dtype, settings.parallel, experts=world.experts)
    outline.fill(frozen, _place(settings, world))
    return Reference(frozen, world.device)


def _place(settings: TrainerConfig | SftConfig, world: World) -> torch.device:
    is_in_main_memory = settings.parallel.offload_optimizer or world.device.type == "cpu"
    return torch.device("cpu") if is_in_main_memory else world.device


def refuse_too_large(
    base: ModelConfig,
    settings: TrainerConfig | SftConfig,
    world: World,
    *,
    keeps_reference: bool = False,
    usable_memory: Callable[[torch.device], int | None] | None = None,
) -> None:
    """ConfigError when weights, gradients and moments alone are more than a GPU has.

    All ranks call this together. On CPUs it only warns: the system may still find memory. Nothing
    is said of a model whose files are not here yet.
    """
    folder, on_gpu = model_folder(base.name), world.device.type == "cuda"
    shape = None if folder is None else read_model_shape(folder)
    usable, misfit = (usable_memory or _usable_memory)(world.device), ""
    if shape is not None and usable is not None:
        held = footprint_of(shape, settings, on_gpu=on_gpu, keeps_reference=keeps_reference)
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        misfit = held.misfit(usable, ranks=1 if on_gpu else neighbours)
    text = f"model {base.name!r}: {misfit}"
    if not world.all_agree(not (misfit and on_gpu)):
        raise ConfigError(text if misfit else "another rank's GPU is too small")
    if misfit and world.is_first:
        logger.warning("%s", text)


def _usable_memory(device: torch.device) -> int | None:
    """All of the GPU, since an engine that shares it leaves when the trainer steps; of a machine
    what is free. None when it does not say."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(size) for _, size, _ in sizes), None)

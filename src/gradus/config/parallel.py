"""How the trainer splits the model and its sequences over processes, and what that cannot be."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.problems import Problem
from gradus.config.schema import KeyPath

NO_COMPILER = (
    "torch.compile needs a C compiler and none is here (looked for $CXX, $CC, g++, gcc, clang++, "
    "clang, cc); install one, or turn compile off"
)


class ParallelConfig(StrictConfig):
    """Splitting over processes, and what is traded for memory or speed; see docs/training.md."""

    replicate_size: int = Field(1, ge=1)
    """Copies of the model. Each copy is sharded over the processes divided by this."""
    context_parallel_size: int = Field(1, ge=1)
    """Processes that share the tokens of one micro batch, for sequences too long for one device."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward; off saves a gather and costs memory."""
    gradient_sync: Literal["last", "each"] = "last"
    """Add gradients up over processes after the last micro batch of a step (fewest transfers, one
    whole float32 gradient on each device) or after each (only a shard stays)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Compute activations again in backward instead of keeping them: of no layer, all but
    attention and every second matrix product, or all."""
    offload_optimizer: bool = False
    """Keep a GPU's master weights, gradients and optimizer state in CPU memory and update them
    there; trainers on CPUs warn and go on."""
    compile: bool = False
    """Compile each layer with torch.compile, without attention; the first step takes longer."""


def data_parallel_size(num_processes: int, parallel: ParallelConfig) -> int:
    """Ranks that batches are packed for; the processes of one of them share its micro batches."""
    return num_processes // parallel.context_parallel_size


def parallel_problems(
    path: KeyPath, parallel: ParallelConfig, num_processes: int
) -> Iterator[Problem]:
    """Sizes that do not divide the number of processes."""
    for name in ("replicate_size", "context_parallel_size"):
        size: int = getattr(parallel, name)
        if num_processes % size:
            yield Problem(
                (*path, name),
                f"{size} does not divide the {num_processes} processes of the trainer; "
                f"change it, or make num_processes a multiple of {size}",
            )


def has_compiler(variables: Mapping[str, str]) -> bool:
    """Whether this machine has a C compiler, which torch.compile needs."""
    chosen = [variables[name] for name in ("CXX", "CC") if variables.get(name)]
    names = [*chosen, "g++", "gcc", "clang++", "clang", "cc"]
    return any(shutil.which(name, path=variables.get("PATH")) for name in names)


def head_problem(num_heads: int, num_key_heads: int, context_parallel_size: int) -> str | None:
    """Why attention heads cannot be shared out; None when they can.

    Key heads fewer than the processes are copied, so they must divide evenly one way or the other.
    """
    size = context_parallel_size
    if num_heads % size:
        return f"the model's {num_heads} attention heads cannot be shared by {size} processes"
    if num_key_heads % size and size % num_key_heads:
        return (
            f"the model's {num_key_heads} key heads can neither be shared by {size} processes nor "
            "copied evenly to them"
        )
    return None

"""How the trainer splits the model and its sequences over processes, and what that cannot be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradus.config.base import StrictConfig


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

"""How the trainer learns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.bench import BenchConfig
from gradus.config.lora import ServedLoraConfig
from gradus.config.optimizer import AdamWConfig, OptimizerConfig
from gradus.config.parallel import ParallelConfig


class LossConfig(StrictConfig):
    """The loss of the rl component; ce and ref_kl have none to choose."""

    type: str = "dppo"
    """`dppo`, `ipo`, `ppo_clip`, `dapo`, `cispo`, `gspo`, or "package.module:Class"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss; docs/algorithms.md lists those of each."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """What of the rl component counts alike: every token, or every sample with tokens that train,
    whatever its length."""


class TrainerConfig(StrictConfig):
    """Loss, optimizer, precision and parallelism."""

    loss: LossConfig = LossConfig()
    """Per-token loss of the rl component."""
    optimizer: OptimizerConfig = AdamWConfig()
    """Optimizer and schedule."""
    lora: ServedLoraConfig | None = None
    """Train low-rank adapters beside frozen weights. None means to train every weight."""
    num_processes: int = Field(1, ge=1)
    """Processes, one per device; more than one start under torchrun."""
    parallel: ParallelConfig = ParallelConfig()
    """How the processes share the model and the sequences."""
    micro_batch_tokens: int = Field(8192, ge=8)
    """Most tokens of one forward on one rank."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward; master weights and reductions are float32."""
    logits_dtype: Literal["float32", "compute"] = "float32"
    """How the output layer's products are kept: as their float32 sums, or rounded to the compute
    dtype as inference engines do, which in bfloat16 moves a logprob by about 0.01 nats."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps for each batch: its groups are split into as many parts, each with its own
    denominators. A version and the learning rate's schedule go by batches."""
    deterministic: bool = False
    """Use only deterministic kernels and one thread, for bitwise repeats."""
    max_skipped_steps: int = Field(5, ge=1)
    """Steps in a row with non-finite gradients after which the run ends."""
    receive_timeout_seconds: float = Field(1800.0, gt=0)
    """Deadline for the orchestrator's next batch."""
    weight_transfer: Literal["filesystem", "broadcast"] = "filesystem"
    """How weights reach inference: `filesystem`, or `broadcast` from memory to memory, over nccl
    between GPUs and gloo on a CPU."""
    keep_published: int = Field(2, ge=1)
    """Published versions kept on disk; with `broadcast`, in the memory of rank 0 until they are
    sent."""
    peak_teraflops: float | None = Field(None, gt=0)
    """Peak of one device in bfloat16 TFLOP/s, for MFU. None means that of a known GPU, and no MFU
    on any other device."""
    bench: BenchConfig = BenchConfig()
    """Made-up samples of `gradus bench-trainer`."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the trainer processes."""

"""How the trainer learns: loss, optimizer, precision, adapters and parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from gradus.config.schema.base import Precision, StrictConfig
from gradus.config.schema.learning import AdamWConfig, DppoConfig, LossChoice, OptimizerConfig


class LoraConfig(StrictConfig):
    """Low-rank adapters beside frozen linear layers (Hu et al., arXiv:2106.09685)."""

    rank: int = Field(16, ge=1, le=512)
    """Inner dimension of an adapter."""
    alpha: int = Field(32, ge=1)
    """The adapter's output is multiplied by alpha / rank."""
    target_modules: list[str] | None = Field(None, min_length=1)
    """Last parts of the names of the linear layers to adapt, and "experts" for those of a mixture,
    each with factors of its own. None means all of attention and MLP, without experts."""

    @field_validator("target_modules")
    @classmethod
    def _lie_in_layers(cls, names: list[str] | None) -> list[str] | None:
        outside = sorted({*(names or ())} & {"lm_head", "embed_out", "embed_tokens", "wte"})
        if outside:
            raise ValueError(
                f"{outside[0]!r} is adapted nowhere: only linear layers of attention and MLP, and "
                "experts, have adapters"
            )
        return names

    @property
    def adapts_experts(self) -> bool:
        return "experts" in (self.target_modules or ())


class ServedLoraConfig(LoraConfig):
    """Low-rank adapters, and how they reach inference."""

    serve: Literal["adapter", "merged"] = "adapter"
    """`adapter` publishes only the adapter, which vLLM applies beside the base model; `merged`
    publishes whole weights with the adapter added, for models whose adapters vLLM does not take."""


class ParallelConfig(StrictConfig):
    """Splitting over processes, and what is traded for memory or speed; see docs/training.md."""

    replicate_size: int = Field(1, ge=1)
    """Copies of the model. Each copy is sharded over the processes divided by this."""
    context_parallel_size: int = Field(1, ge=1)
    """Processes that share the tokens of one micro batch, for sequences too long for one device."""
    expert_parallel_size: int = Field(1, ge=1)
    """Processes that share the experts of a layer: each computes those that it keeps, for the
    tokens of all. Must divide experts, and the processes of one copy of the model."""
    context_parallel_style: Literal["heads", "ring"] = "heads"
    """How they attend: each with a part of the `heads`, which its size must divide, or with a part
    of each sample's tokens, while keys travel in a `ring`: any number of heads, more transfers.
    Layers that carry state share heads in both."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward; off saves a gather and costs memory."""
    gradient_sync: Literal["auto", "last", "each"] = "auto"
    """Add gradients up over processes after the `last` micro batch of a step (fewest transfers, one
    whole float32 gradient on each device) or after `each` (only a shard stays). `auto` means
    `each` on GPUs and `last` on CPUs."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Compute activations again in backward instead of keeping them: of no layer, all but
    attention and every second matrix product, or all."""
    offload_activations: bool = False
    """Keep what `activation_checkpointing = "full"` keeps, the input of each layer, in a GPU's CPU
    memory until backward; trainers on CPUs warn and continue."""
    offload_optimizer: bool = False
    """Keep a GPU's master weights, gradients and optimizer state in CPU memory and update them
    there; trainers on CPUs warn and continue."""
    float8: bool = False
    """Multiply the linear layers of decoder layers in float8 by `torchao`, on GPUs since Ada and
    Hopper; the output layer, routers and experts stay as they are. Not with adapters."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each layer with torch.compile, without attention; the first step takes longer. `auto`
    means on GPUs that have a C compiler and Triton beside them, and not on CPUs."""

    def problems(self, num_processes: int) -> Iterator[tuple[str, str]]:
        """Sizes that do not divide the number of processes: the key, and why."""
        for name in ("replicate_size", "context_parallel_size"):
            size: int = getattr(self, name)
            if num_processes % size:
                yield (
                    name,
                    f"{size} does not divide the {num_processes} processes of the trainer; "
                    f"change it, or make num_processes a multiple of {size}",
                )
        shards, experts = num_processes // self.replicate_size, self.expert_parallel_size
        if shards % experts:
            yield (
                "expert_parallel_size",
                f"{experts} does not divide the {shards} processes of one copy of the model; "
                f"change it, num_processes = {num_processes} or replicate_size",
            )


def data_parallel_size(num_processes: int, parallel: ParallelConfig) -> int:
    """Ranks that batches are packed for; the processes of one of them share its micro batches."""
    return num_processes // parallel.context_parallel_size


class BenchConfig(StrictConfig):
    """What `gradus bench-trainer` trains on; a run itself does not use it."""

    steps: int = Field(5, ge=1)
    """Measured steps."""
    warmup_steps: int = Field(2, ge=0)
    """Steps before them, which compile, allocate and are not counted."""
    samples_per_step: int = Field(16, ge=1)
    """Samples of one batch, over all ranks."""
    sample_tokens: int | None = Field(None, ge=2)
    """Tokens of the longest sample. None means model.max_length_tokens."""
    ragged: bool = True
    """Draw lengths evenly between a quarter of the longest and the longest; off, all are alike."""


class LearningConfig(StrictConfig):
    """What the trainers of every kind of run have."""

    num_processes: int = Field(1, ge=1)
    """Processes, one per device; more than one start under torchrun."""
    gpus: list[int] | None = None
    """GPUs of the trainer, one for each process, counted as in `inference.gpus`. None means those
    after the engine's; [] trains on the CPU."""
    parallel: ParallelConfig = ParallelConfig()
    """How the processes share the model and the sequences."""
    micro_batch_tokens: int = Field(8192, ge=8)
    """Most tokens of one forward on one rank."""
    micro_batch_patches: int | None = Field(None, ge=4)
    """Most patches that the different images of one forward have, of a model that reads images: its
    memory grows with them. None leaves it to `micro_batch_tokens`, with which their placeholders
    count: four patches are a token of Qwen's models."""
    train_vision: bool = False
    """Train also what turns images into embeddings, of a model that reads images; off, it stays as
    it is. Not with adapters."""
    deterministic: bool = False
    """Use only deterministic kernels and one thread, for bitwise repeats."""
    peak_teraflops: float | None = Field(None, gt=0)
    """Peak of one device in bfloat16 TFLOP/s, for MFU. None means that of a known GPU, and no MFU
    on any other device."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the trainer processes."""


class TrainerConfig(LearningConfig):
    """Loss, optimizer, precision and parallelism."""

    loss: LossChoice = DppoConfig()
    """Per-token loss of the rl component."""
    optimizer: OptimizerConfig = AdamWConfig()
    """Optimizer and schedule."""
    lora: ServedLoraConfig | None = None
    """Train low-rank adapters beside frozen weights. None means to train every weight."""
    compute_dtype: Precision = "auto"
    """Precision of forward and backward; master weights and reductions are float32. "auto" is that
    of the engine where one is written, else bfloat16 on GPUs and on CPUs that multiply it, float32
    on others."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps for each batch: its groups are split into as many parts, each with its own
    denominators. A version and the learning rate's schedule go by batches."""
    recompute_logprobs: bool = False
    """Read each batch once before its first update, and limit the policy against what the trainer
    itself says then, not against what the engine said when it sampled; what lies between the two
    becomes a weight (decoupled PPO). Costs one forward."""
    router_replay: Literal["off", "engine"] = "off"
    """Which experts compute a token of a mixture of experts: those that the trainer's routers
    choose, or those that the `engine` chose when it sampled, weighed by the trainer's own scores
    (arXiv:2510.11370). Costs 2 bytes for each layer and expert of a token."""
    router_bias_rate: float = Field(0.0, ge=0, lt=1)
    """By how much, after each batch, the bias that DeepSeek, GLM and others add to an expert's
    score for the choice alone rises where it had fewer tokens than its layer's mean, and falls
    where it had more (arXiv:2408.15664, which takes 0.001). 0 leaves the biases as they are."""
    weight_transfer: Literal["auto", "filesystem", "broadcast"] = "filesystem"
    """How weights reach inference: `filesystem`, or `broadcast` from memory to memory. "auto" is
    `broadcast` where trainer and the one engine have their own GPUs of one machine and no adapter
    is served, which has not run on GPUs yet."""
    broadcast_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries a broadcast: nccl between GPUs, gloo through main memory. "auto" is nccl where
    trainer and engine have their own GPUs. Both ends are told, and refuse another one."""
    recorded_share: float = Field(0.25, ge=0, le=1)
    """Share of the groups of each step of which `tokens/` keeps what engine and trainer said of
    each token, at most 16 MiB a step; 0 keeps none. `gradus view` colours replies by it."""
    bench: BenchConfig = BenchConfig()
    """Made-up samples of `gradus bench-trainer`."""

"""What a trainer's rank will hold at most, in bytes by part, computed before anything is loaded.

Numbers of parameters decide the weights, their gradients, the optimizer's state and what FSDP
gathers; those parts are exact up to rounding to whole blocks. Activations, logits and what the
libraries keep for themselves are estimates: on GPUs 1.03 to 1.19 of three peaks that were measured
(docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradus.config.schema.learning import OptimizerConfig, SgdConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import ParallelConfig, TrainerConfig
from gradus.plan.gpus import GIB
from gradus.plan.memory.kept import kept_bytes, measured_families, stand_in
from gradus.plan.memory.shape import ModelShape, read_model_shape

_MASTER = 4
"""Bytes of a float32 number: masters, gradients, moments."""
_LIBRARIES_ON_GPU = 3 * GIB // 4
"""CUDA's context and its libraries' workspaces; a guess."""
_TRANSFERS_ON_GPU = GIB // 2
"""nccl's buffers, where there is more than one rank; a guess."""
_PROCESS_ON_HOST = 5 * GIB // 8
"""A process that has imported torch and transformers: 0.6 GiB here."""
_FRAGMENTS = 0.05
"""Share of activations and gathered weights that an allocator leaves unused; a guess."""
_LOGIT_BLOCKS = 3
"""Blocks of logits that exist at once: the logits, their exponentials, a gradient."""
_DOUBT = 0.8
"""Share of a prediction that must fit; estimates are off by less than the rest, it is hoped."""
_REMEDIES = {
    "weights": "more num_processes, lora, parallel.offload_optimizer",
    "gradients": "parallel.gradient_sync = 'each', lora, parallel.offload_optimizer",
    "optimizer": "more num_processes, lora, parallel.offload_optimizer",
    "reference": "lora, algo.reference, trainer.loss.reference_kl_coefficient = 0",
    "gathered layers": "parallel.reshard_after_forward = true",
    "images": "a lower micro_batch_patches",
    "activations": "a lower micro_batch_tokens, parallel.activation_checkpointing = 'full'",
}
"""Part → what lowers it."""
_OUTER_STATES = 2
"""Hidden states that are kept outside of layers: those of the targets, and of the last norm."""
_BLOCK_ON_GPU, _BLOCK_ON_CPU = 4096 * 16384, 512 * 1024
"""Logits of one block."""


@dataclass(frozen=True)
class Misfit:
    """More memory is needed than there is."""

    is_certain: bool
    """Exceeded by what is exact, or by more than the estimates can be off."""
    text: str


@dataclass(frozen=True)
class Footprint:
    """What one rank holds at most, in bytes."""

    states: Mapping[str, int]
    """On the device, exact: weights, gradients, optimizer, gathered layers."""
    working: Mapping[str, int]
    """On the device, estimated: activations, logits, libraries."""
    host: Mapping[str, int]
    """In main memory. A trainer on CPUs has its states and working memory there too."""
    on_gpu: bool
    doubts: tuple[str, ...] = ()
    """What was not counted, or not measured."""

    @property
    def device_bytes(self) -> int:
        return sum(self._device.values()) if self.on_gpu else 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (0 if self.on_gpu else sum(self._device.values()))

    @property
    def certain_bytes(self) -> int:
        """Of `states` alone: less can never do."""
        return sum(self.states.values())

    def misfit(self, usable_bytes: int, *, ranks: int = 1) -> Misfit | None:
        """Why `ranks` of this size do not fit into so much memory: that of one GPU, or the main
        memory of a machine for trainers on CPUs."""
        needed = ranks * (self.device_bytes if self.on_gpu else self.host_bytes)
        if needed <= usable_bytes:
            return None
        certain = ranks * self.certain_bytes
        parts = self._device.keys() & _REMEDIES.keys()
        largest = sorted(parts, key=lambda part: -self._device[part])[:2]
        remedies = "; ".join(f"{it}: {_REMEDIES[it]}" for it in largest)
        kind = "the GPU" if self.on_gpu else "the main memory"
        each = "" if ranks == 1 else f" for each of {ranks} ranks"
        return Misfit(
            is_certain=certain > usable_bytes or _DOUBT * needed > usable_bytes,
            text=f"training needs about {needed / GIB:.1f} GiB of {kind}, of which "
            f"{usable_bytes / GIB:.1f} GiB can be used ({listed(self._device)}{each}). "
            f"What lowers it: {remedies}",
        )

    @property
    def _device(self) -> dict[str, int]:
        return {**self.states, **self.working}

    def __str__(self) -> str:
        parts = {**self.host} if self.on_gpu else {**self._device, **self.host}
        text = f"host {self.host_bytes / GIB:.1f} GiB: {listed(parts)}"
        if self.on_gpu:
            text = f"device {self.device_bytes / GIB:.1f} GiB: {listed(self._device)}; {text}"
        return "; ".join([text, *self.doubts])


def predict_memory(
    folder: Path,
    settings: TrainerConfig | SftConfig,
    *,
    on_gpu: bool,
    keeps_reference: bool = False,
) -> Footprint | None:
    """As `footprint_of`, of the model in a folder; None when its files do not say how large it is.

    Reads config.json and the headers of the safetensors files.
    """
    shape = read_model_shape(folder)
    if shape is None:
        return None
    return footprint_of(shape, settings, on_gpu=on_gpu, keeps_reference=keeps_reference)


def footprint_of(
    shape: ModelShape,
    settings: TrainerConfig | SftConfig,
    *,
    on_gpu: bool,
    keeps_reference: bool = False,
    longest: int | None = None,
) -> Footprint:
    """The most that one rank of this trainer holds, on its device and in main memory.

    `keeps_reference` says that the initial weights stay, which adapters have beneath them anyway;
    `longest` tells the tokens of the longest sample, else as many as a micro batch has.
    """
    plan = _Plan.of(shape, settings, on_gpu)
    states = {
        "weights": plan.weight_bytes,
        "gradients": plan.gradient_bytes,
        "optimizer": plan.optimizer_bytes,
    }
    if keeps_reference and settings.lora is None:
        states["reference"] = plan.compute * shape.num_parameters // plan.shards
    host = {"process": _PROCESS_ON_HOST}
    if isinstance(settings, TrainerConfig):
        host["version being published"] = plan.published_bytes
    if plan.parallel.offload_optimizer and plan.on_gpu:
        host |= {f"{name} (offloaded)": size for name, size in states.items()}
        states = {}
    states["gathered layers"] = plan.gathered_bytes
    working = {
        "activations": plan.activation_bytes(min(longest or plan.tokens, plan.tokens)),
        "logits": plan.logit_bytes,
    }
    if shape.patch and settings.micro_batch_patches is not None:
        working["images"] = plan.image_bytes(settings.micro_batch_patches, settings.train_vision)
    if on_gpu:
        moved = states["gathered layers"] + working["activations"]
        working["libraries"] = _LIBRARIES_ON_GPU + (_TRANSFERS_ON_GPU if plan.ranks > 1 else 0)
        working["fragments"] = int(_FRAGMENTS * moved)
    return Footprint(states, working, host, on_gpu, tuple(_doubts(shape, settings)))


def _doubts(shape: ModelShape, settings: TrainerConfig | SftConfig) -> Iterator[str]:
    if shape.family not in measured_families():
        others = sorted({stand_in(shape.family, kind) for kind in shape.kinds})
        yield f"activations as of {' and '.join(others)}, for this family's were not measured"
    if shape.patch and settings.micro_batch_patches is None:
        yield "images not counted, for micro_batch_patches is not set"


@dataclass(frozen=True)
class _Plan:
    """How a trainer splits a model."""

    shape: ModelShape
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    ranks: int
    compute: int
    """Bytes of a number in the compute dtype."""
    trained: int
    """Parameters that change."""
    frozen: int
    """Parameters that stay, beside adapters; kept in the compute dtype."""
    tower: int
    """Those of a tower that stays while everything else trains; kept in the compute dtype too."""
    published_bytes: int
    rank: int
    """Of adapters."""
    tokens: int
    """Of a micro batch."""
    on_gpu: bool

    @classmethod
    def of(cls, shape: ModelShape, settings: TrainerConfig | SftConfig, on_gpu: bool) -> _Plan:
        """Trains every parameter, or adapters beside all of them."""
        lora, trained, frozen = settings.lora, shape.num_parameters, 0
        published = trained
        kept = shape.num_sound_parameters if settings.train_vision else shape.num_tower_parameters
        tower = kept if lora is None else 0
        compute = _MASTER if settings.compute_dtype == "float32" else 2
        if lora is not None:
            adapters = shape.num_adapter_parameters(lora.rank, lora.target_modules)
            trained, frozen = adapters, shape.num_parameters
            if getattr(lora, "serve", "merged") == "adapter":
                published = adapters
        return cls(
            shape=shape,
            parallel=settings.parallel,
            optimizer=settings.optimizer,
            ranks=settings.num_processes,
            compute=compute,
            trained=trained - tower,
            frozen=frozen,
            tower=tower,
            published_bytes=published * compute,
            rank=0 if lora is None else lora.rank,
            tokens=settings.micro_batch_tokens,
            on_gpu=on_gpu,
        )

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model."""
        return max(1, self.ranks // self.parallel.replicate_size)

    @property
    def weight_bytes(self) -> int:
        kept = self.compute * (self.frozen + self.tower)
        return (_MASTER * self.trained + kept) // self.shards

    @property
    def gradient_bytes(self) -> int:
        """A shard; and the whole gradient where micro batches are added up before they are shared
        out."""
        shard = _MASTER * self.trained // self.shards
        by_device = "each" if self.on_gpu else "last"
        sync = self.parallel.gradient_sync
        is_kept = (by_device if sync == "auto" else sync) == "last"
        elsewhere = 0 if self.frozen else self._elsewhere(self.shape.num_expert_parameters)
        whole = _MASTER * (self.trained - elsewhere) if is_kept else 0
        return shard if self.shards == 1 else shard + whole

    @property
    def optimizer_bytes(self) -> int:
        """Two moments; of Muon, which keeps one of a matrix, that is an upper bound."""
        rule, moments = self.optimizer, 2
        if isinstance(rule, SgdConfig):
            moments = 1 if rule.momentum else 0
        return moments * _MASTER * self.trained // self.shards

    @property
    def gathered_bytes(self) -> int:
        """What a forward needs whole: two layers (one is fetched ahead), embedding and head; or
        everything. On the way back also the gradients of two layers, in float32."""
        shape = self.shape
        largest = shape.largest_layer - self._elsewhere(shape.largest_experts)
        layers = shape.num_layer_parameters - self._elsewhere(shape.num_expert_parameters)
        two = min(2 * largest, layers)
        held = two if self.parallel.reshard_after_forward else layers
        weights = self.compute * (held + self.shape.num_outer_parameters)
        share = self.trained / max(1, self.trained + self.frozen)
        return weights + int(share * _MASTER * two)

    def _elsewhere(self, experts: int) -> int:
        """Of so many parameters of experts, those that other ranks compute with."""
        return experts - experts // self.parallel.expert_parallel_size

    def activation_bytes(self, longest: int) -> int:
        """What backward needs of every layer up to the one that it is at, which is whole."""
        tokens = -(-self.tokens // self.parallel.context_parallel_size)
        mode = self.parallel.activation_checkpointing
        inputs = self.compute * self.shape.hidden_size
        kept = peak = 0.0
        for layer in self._layers(longest):
            whole = self._held(*layer, "none")
            each = inputs if mode == "full" else self._held(*layer, mode)
            peak = max(peak, kept + whole + self._held(*layer, "back"))
            kept += each
        # The output layer is done with its blocks before a layer needs its own.
        held = max(kept, peak - self._block_bytes / tokens)
        return int(tokens * (held + _OUTER_STATES * inputs + self._ring_bytes))

    def _layers(self, longest: int) -> Iterator[tuple[str, float]]:
        """Kind, and numbers that scores of attention have, of each."""
        shape = self.shape
        scores = shape.widths["heads"] * longest * (1 + shape.scores.has_caps)
        for number, kind in enumerate(shape.kinds):
            has_scores = "attention" in kind and shape.scores.are_kept(
                number, longest, itemsize=self.compute, on_gpu=self.on_gpu
            )
            yield kind, scores if has_scores else 0

    def _held(self, kind: str, scores: float, mode: str) -> float:
        """Bytes of a token in a layer of this kind; `mode` is a row of the table."""
        shape = self.shape
        way = mode if not self.frozen else f"{mode}, adapters"
        sizes = {**shape.widths, "rank": self.rank}
        if self.on_gpu:
            # The kernels that GPUs have for states keep neither chunks nor their states.
            sizes |= {"chunks": 0, "states": 0, "state heads": 0}
        size = kept_bytes(shape.family, kind, way, sizes, is_wide=self.compute == _MASTER)
        rule = shape.scores
        # In the place of what its kernel keeps; with caps and sinks no layer was measured by one.
        result = 0 if rule.has_caps or rule.has_sinks or not scores else shape.query_size
        more = {"none": scores - result, "selective": -shape.query_size if scores else 0, "back": 0}
        return size + self.compute * more[mode]

    def image_bytes(self, patches: int, trains: bool) -> int:
        """Pixels of this micro batch and of one being made ready, and what a trained tower keeps;
        one that stays keeps nothing."""
        patch = self.shape.patch
        return int(patches * self.compute * (2 * patch["pixels"] + trains * patch["kept"]))

    @property
    def _ring_bytes(self) -> float:
        """Per token, of one layer: keys and values that are here and those that arrive, their
        gradients likewise in float32, and the merged result."""
        parallel = self.parallel
        if parallel.context_parallel_size == 1 or parallel.context_parallel_style == "heads":
            return 0
        pair = 2 * self.shape.key_size
        return 2 * (self.compute + _MASTER) * pair + 2 * _MASTER * self.shape.query_size

    @property
    def _block_bytes(self) -> int:
        """Some blocks of logits."""
        block = _BLOCK_ON_GPU if self.on_gpu else _BLOCK_ON_CPU
        return _LOGIT_BLOCKS * _MASTER * min(block, self.tokens * self.shape.vocabulary)

    @property
    def logit_bytes(self) -> int:
        """Those, and the gradient of the head in float32."""
        head = self.shape.vocabulary * self.shape.hidden_size
        return self._block_bytes + (0 if self.frozen else self.compute * head)


def listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)

"""How fast a step is: seconds of each rung, tokens per second, MFU, memory and padding.

The operations that a model needs are counted by the formula of docs/training.md.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from gradus.heartbeat import beat
from gradus.log import get_logger
from gradus.trainer.distributed import World
from gradus.trainer.images.tower import TowerFlops, text_part
from gradus.trainer.model.context.parts import count_ring_padding
from gradus.trainer.model.cpu.attention import count_padding
from gradus.trainer.model.cpu.routing import chosen_experts
from gradus.trainer.model.cpu.states import state_mixers
from gradus.trainer.model.kernels import Attention, Platform
from gradus.trainer.model.policy_model import layer_configs, output_head
from gradus.trainer.tensors import count_targets
from gradus.wire.micro_batch import MicroBatch

logger = get_logger(__name__)


class Stopwatch:
    """Measures one step.

    >>> watch = Stopwatch()
    >>> with watch.measure("optimize"):
    ...     pass
    >>> sorted(watch.metrics())
    ['time/optimize_seconds', 'time/step_seconds']
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._clock = clock
        self._is_asynchronous = device is not None and device.type == "cuda"
        self._start = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, rung: str) -> Iterator[None]:
        """Add the time inside the block to `rung`; waits for a GPU to finish."""
        start = self._clock()
        beat(rung)
        try:
            yield
        finally:
            if self._is_asynchronous:
                torch.cuda.synchronize()
            self._seconds[rung] = self._seconds.get(rung, 0.0) + self._clock() - start

    def seconds(self, rung: str) -> float:
        """Time spent in `rung` so far; 0 when it never ran."""
        return self._seconds.get(rung, 0.0)

    def metrics(self) -> dict[str, float]:
        """`time/<rung>_seconds` of every rung, and `time/step_seconds` since the start."""
        rungs = {f"time/{name}_seconds": value for name, value in self._seconds.items()}
        return rungs | {"time/step_seconds": self._clock() - self._start}

    def trained_tokens_per_second(self, tokens: int) -> float:
        """Tokens read in forward and backward over the time of learning, without waiting."""
        learning = self.learning_seconds
        return tokens / learning if learning > 0 else 0.0

    @property
    def learning_seconds(self) -> float:
        """Time of forward, backward and update, and of the reference's forward."""
        return sum(self.seconds(name) for name in ("score", "forward_backward", "optimize"))


@dataclass(frozen=True)
class WorkMeter:
    """How well the devices are used; a collective, so all ranks measure each step."""

    flops: ModelFlops
    world: World
    compute_dtype: torch.dtype
    peak_teraflops: float | None
    """Of one device; None means not known, and no MFU."""
    attention: Attention
    """What attends, on which padding depends."""

    @classmethod
    def build(
        cls, model: PreTrainedModel, world: World, dtype: torch.dtype, peak: float | None
    ) -> WorkMeter:
        """With the peak that the user gives, or that of a known GPU."""
        if peak is None and world.device.type == "cuda":
            peak = peak_teraflops(torch.cuda.get_device_name(world.device))
        platform, size = Platform.of(world.device), head_size(model)
        is_capped = caps_scores(model)
        if world.is_first:
            logger.info("kernels: %s", platform.names(dtype, size, is_capped=is_capped))
        attention = platform.attention(dtype, size, is_capped=is_capped)
        return cls(ModelFlops.of(model), world, dtype, peak, attention)

    def measure(self, micro_batches: Sequence[MicroBatch], watch: Stopwatch) -> dict[str, float]:
        """Metrics of one step over all ranks."""
        totals = self.world.sums(
            {
                "flops": self.flops.of_step(micro_batches),
                "padding": sum(
                    padding_rows(
                        micro_batch,
                        attention=self.attention,
                        dtype=self.compute_dtype,
                        context_size=self.world.context_size,
                        is_ring=self.world.context is not None and self.world.context.is_ring,
                    )
                    for micro_batch in micro_batches
                ),
                "tokens": sum(0 if m.is_dummy else len(m) for m in micro_batches),
            }
        )
        seconds = watch.learning_seconds
        teraflops = totals["flops"] / seconds / 1e12 / self.world.size if seconds > 0 else 0.0
        tower = self.flops.tower
        peaks = {"throughput/peak_memory_gib": peak_memory_gib(self.world.device)}
        if tower is not None:
            peaks["batch/patches/max"] = float(max(map(tower.num_patches, micro_batches)))
        metrics = {
            "throughput/model_teraflops_per_second": teraflops,
            **self.world.maxima(peaks),
            "batch/padding/share": totals["padding"] / (totals["padding"] + totals["tokens"]),
        }
        if self.peak_teraflops is not None:
            metrics["throughput/mfu/share"] = teraflops / self.peak_teraflops
        return metrics


def padding_rows(
    micro_batch: MicroBatch,
    *,
    attention: Attention,
    dtype: torch.dtype,
    context_size: int,
    is_ring: bool = False,
) -> int:
    """Rows that are computed and hold no token: dummies, blocks, and parts of a context."""
    if micro_batch.is_dummy:
        return len(micro_batch)
    if is_ring:
        return count_ring_padding(micro_batch.sequence_lengths, context_size)
    rows = 0 if attention == "varlen" else count_padding(micro_batch.sequence_lengths, dtype)
    return rows + -len(micro_batch) % context_size


def peak_memory_gib(device: torch.device) -> float:
    """Most memory so far: of a GPU as torch allocated it, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# Floating-point operations.

_TRAINED, _FROZEN = 6, 4
"""Per weight and token: 2 in the forward, 2 for the gradient of the input, 2 for that of the
weight unless it is frozen."""
_ATTENTION = 6
"""Per query-key pair, head and channel of a key or of a value: 2, three times over."""
_CHUNK = 64
"""Tokens that linear attention multiplies with each other."""

_WITHOUT_ATTENTION = frozenset({"linear_attention", "mamba", "conv", "moe", "mlp"})
"""Kinds of layers in a config that attend to no pairs."""

PEAK_TERAFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
}
"""Part of a GPU's name → dense bfloat16 TFLOP/s from its data sheet; the first match counts."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of forward and backward, by what they depend on."""

    per_token: float
    """Layers, without attention's scores; of experts only the chosen ones."""
    per_target: float
    """Output layer."""
    per_pair: tuple[float, ...]
    """Of each layer with attention, for one query-key pair."""
    windows: tuple[int | None, ...]
    """Of each of them, how many tokens back it sees; None means all."""
    chunks: tuple[int | None, ...]
    """Of each of them, the tokens of a chunk outside of which it sees nothing; None without."""
    uncounted: float = 0.0
    """Of `per_token`, what transformers' form for CPUs does without matrix products."""
    tower: TowerFlops | None = None
    """None without one."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Counts weights; also of a sharded model."""
        config = model.config.get_text_config()
        head, attending = output_head(model), _attending(config)
        delta, scan = _state_flops(model)
        return cls(
            per_token=_layer_flops(model) + delta + scan,
            per_target=float(head.weight.numel()) * _per_weight(head.weight.requires_grad),
            per_pair=tuple(
                float(_ATTENTION * layer.num_attention_heads * sum(_head_sizes(layer)))
                for _, layer in attending
            ),
            windows=tuple(window for window, _ in attending),
            chunks=_chunks(config, len(attending)),
            uncounted=float(scan),
            tower=TowerFlops.of(model),
        )

    def of_step(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Operations of one step's micro batches; dummies need none."""
        total = 0.0
        for micro_batch in micro_batches:
            if micro_batch.is_dummy:
                continue
            total += self.per_token * len(micro_batch)
            total += sum(
                per_pair * causal_pairs(length, window, chunk)
                for per_pair, window, chunk in zip(
                    self.per_pair, self.windows, self.chunks, strict=True
                )
                for length in micro_batch.sequence_lengths
            )
            total += self.per_target * count_targets(micro_batch)
            if self.tower is not None:
                total += self.tower.of_images(micro_batch)
        return total


def head_size(model: PreTrainedModel) -> int:
    """Channels of one attention head's queries and keys, of the layer with most; 0 without
    attention."""
    layers = layer_configs(model.config.get_text_config())
    return max(_head_sizes(layer)[0] for layer in layers)


def caps_scores(model: PreTrainedModel) -> bool:
    """Tell whether attention caps its scores, as that of Gemma 2 does."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


def _head_sizes(config: Any) -> tuple[int, int]:
    """Channels of one head's keys, and of its values, of which latent attention has fewer."""
    parts = [getattr(config, name, None) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(parts):
        return sum(parts), int(config.v_head_dim)
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads if heads else 0
    return int(size), int(size)


def causal_pairs(length: int, window: int | None, chunk: int | None = None) -> int:
    """Query-key pairs of a sample when each token sees itself and those before it, in its chunk.

    >>> causal_pairs(3, None), causal_pairs(3, 2), causal_pairs(3, None, 2)
    (6, 5, 4)
    """
    if chunk is not None and chunk < length:
        whole, rest = divmod(length, chunk)
        return whole * causal_pairs(chunk, window) + causal_pairs(rest, window)
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def peak_teraflops(device_name: str) -> float | None:
    """Peak of one device in bfloat16; None when it is not in the table."""
    return next((peak for part, peak in PEAK_TERAFLOPS.items() if part in device_name), None)


def _layer_flops(model: PreTrainedModel) -> float:
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((it for name in names if (it := getattr(config, name, None))), None)
    chosen = chosen_experts(config) or 1
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    ends = {id(module.weight) for module in (output_head(model), *tables)}
    total = 0.0
    for name, parameter in text_part(model).named_parameters():
        if id(parameter) in ends or parameter.ndim not in (2, 3):
            continue
        is_stack = parameter.ndim == 3 and ".conv" not in name and "_conv1d" not in name
        if parameter.ndim == 2 and name.endswith("bias"):
            continue  # Of experts, one row each.
        used = chosen / experts if is_stack and experts else 1.0
        total += parameter.numel() * used * _per_weight(parameter.requires_grad)
    return total


def _state_flops(model: PreTrainedModel) -> tuple[int, int]:
    """Per token, of scans in chunks: what transformers does by products, and what it does not."""
    delta = scan = 0
    for mixer in state_mixers(model):
        it: Any = mixer
        if state := getattr(mixer, "ssm_state_size", None):
            inside = it.chunk_size * (it.n_groups * state + it.num_heads * it.head_dim)
            scan += 6 * (inside + 2 * it.num_heads * it.head_dim * state)
        elif not type(mixer).__name__.endswith("ShortConv"):
            heads = getattr(mixer, "num_v_heads", None) or it.num_heads
            key = getattr(mixer, "head_k_dim", None) or it.head_dim
            value = getattr(mixer, "head_v_dim", None) or it.head_dim
            pairs = 6 * heads * _CHUNK * 2 * key
            delta += 6 * heads * (_CHUNK * value + 3 * key * value)
            if hasattr(mixer, "num_v_heads"):
                # The gradient of a triangular system is a product; the system itself is none.
                delta += pairs + 2 * heads * _CHUNK * (key + value)
            else:
                # Every channel decays by itself: no plain product of queries and keys.
                delta += 6 * heads * _CHUNK * (key + value)
                scan += pairs
    return delta, scan


def _per_weight(is_trained: bool) -> int:
    return _TRAINED if is_trained else _FROZEN


def _chunks(config: Any, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer; only models all of whose layers attend have any."""
    size, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", ())
    if size is None or not kinds:
        return (None,) * num_layers
    return tuple(size if kind == "chunked_attention" else None for kind in kinds)


def _attending(config: Any) -> list[tuple[int | None, Any]]:
    """The window and the config of each layer with attention."""
    if not getattr(config, "num_attention_heads", 0):
        return []
    window, layers = getattr(config, "sliding_window", None), layer_configs(config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    return [
        (window if kind == "sliding_attention" else None, layer)
        for kind, layer in zip(kinds, layers, strict=True)
        if kind not in _WITHOUT_ATTENTION
    ]

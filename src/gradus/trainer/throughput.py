"""Seconds of each rung of a step, tokens per second, MFU, memory and padding."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from gradus.trainer.distributed import World
from gradus.trainer.flops import ModelFlops, peak_teraflops
from gradus.trainer.model.attention import padded_tokens
from gradus.wire.micro_batch import MicroBatch


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
        """Add the time inside the block to `rung`; a GPU is waited for at its end."""
        start = self._clock()
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
        """Time of forward, backward and update."""
        return self.seconds("forward_backward") + self.seconds("optimize")


@dataclass(frozen=True)
class WorkMeter:
    """How well the devices are used; a collective, so all ranks measure each step.

    >>> meter = WorkMeter(ModelFlops.of(model), world, torch.bfloat16, 989.0)  # doctest: +SKIP
    """

    flops: ModelFlops
    world: World
    compute_dtype: torch.dtype
    peak_teraflops: float | None
    """Of one device; None means not known, and no MFU."""

    @classmethod
    def build(
        cls, model: PreTrainedModel, world: World, dtype: torch.dtype, peak: float | None
    ) -> WorkMeter:
        """With the peak that the user gives, or that of a known GPU."""
        if peak is None and world.device.type == "cuda":
            peak = peak_teraflops(torch.cuda.get_device_name(world.device))
        return cls(ModelFlops.of(model), world, dtype, peak)

    def measure(self, micro_batches: Sequence[MicroBatch], watch: Stopwatch) -> dict[str, float]:
        """Metrics of one step over all ranks."""
        totals = self.world.sums(
            {
                "flops": self.flops.of_step(micro_batches),
                "padding": sum(
                    padding_rows(
                        micro_batch,
                        device=self.world.device,
                        dtype=self.compute_dtype,
                        context_size=self.world.context_size,
                    )
                    for micro_batch in micro_batches
                ),
                "tokens": sum(0 if m.is_dummy else len(m) for m in micro_batches),
            }
        )
        seconds = watch.learning_seconds
        teraflops = totals["flops"] / seconds / 1e12 / self.world.size if seconds > 0 else 0.0
        metrics = {
            "throughput/model_teraflops_per_second": teraflops,
            **self.world.maxima({"throughput/peak_memory_gib": peak_memory_bytes() / 2**30}),
            "batch/padding/share": totals["padding"] / (totals["padding"] + totals["tokens"]),
        }
        if self.peak_teraflops is not None:
            metrics["throughput/mfu"] = teraflops / self.peak_teraflops
        return metrics


def padding_rows(
    micro_batch: MicroBatch, *, device: torch.device, dtype: torch.dtype, context_size: int
) -> int:
    """Rows that are computed and hold no token: dummies, blocks, and parts of a context."""
    if micro_batch.is_dummy:
        return len(micro_batch)
    rows = padded_tokens(micro_batch.sequence_lengths, device, dtype)
    return rows + -len(micro_batch) % context_size


def peak_memory_bytes() -> int:
    """Most memory so far: of the GPU as torch allocated it, or of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

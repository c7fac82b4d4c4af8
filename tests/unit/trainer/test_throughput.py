"""The stopwatch of a step, on a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import build_micro_batch, build_sample
from gpu_stand_in import HOPPER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM

from gradus.trainer.distributed import World
from gradus.trainer.model.kernels import Platform
from gradus.trainer.throughput import ModelFlops, Stopwatch, WorkMeter, padding_rows
from gradus.wire.packing import build_dummy, pack

pytestmark = pytest.mark.torch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rungs_add_up_and_the_step_counts_from_the_start() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(2):
        with watch.measure("optimize"):
            clock.now += 1.5
    clock.now += 1.0
    assert watch.metrics() == {"time/optimize_seconds": 3.0, "time/step_seconds": 4.0}


def test_a_rung_that_fails_is_measured_too() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.measure("receive"):
            clock.now += 2.0
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert watch.seconds("receive") == 2.0


def test_waiting_does_not_count_as_learning() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for rung, seconds in (("receive", 8.0), ("forward_backward", 1.5), ("optimize", 0.5)):
        with watch.measure(rung):
            clock.now += seconds
    assert watch.trained_tokens_per_second(100) == 50.0


def test_a_step_without_learning_has_no_speed() -> None:
    assert Stopwatch(Clock()).trained_tokens_per_second(100) == 0.0


def build_meter(world: World, peak: float | None) -> WorkMeter:
    flops = ModelFlops(per_token=2e12, per_target=0.0, per_pair=(), windows=(), chunks=())
    return WorkMeter(flops, world, torch.float32, peak, "padded")


def watch_of(seconds: float) -> Stopwatch:
    """A watch that saw so many seconds of learning."""
    times = iter([0.0, 0.0, seconds])
    watch = Stopwatch(lambda: next(times))
    with watch.measure("forward_backward"):
        pass
    return watch


def test_mfu_is_the_needed_work_over_what_the_device_could_do(world: World) -> None:
    micro_batch = build_micro_batch([build_sample(6)])
    metrics = build_meter(world, peak=8.0).measure([micro_batch], watch_of(3.0))
    assert metrics["throughput/model_teraflops_per_second"] == pytest.approx(4.0)
    assert metrics["throughput/mfu/share"] == pytest.approx(0.5)
    assert metrics["throughput/peak_memory_gib"] > 0


def test_without_a_known_peak_there_is_no_mfu(world: World) -> None:
    metrics = build_meter(world, peak=None).measure([build_micro_batch()], watch_of(1.0))
    assert "throughput/mfu/share" not in metrics


def test_padding_counts_blocks_and_dummies(world: World) -> None:
    samples = [build_sample(10), build_sample(9, seed=1)]
    micro_batches = [build_micro_batch(samples), build_dummy(samples[0])]
    metrics = build_meter(world, peak=None).measure(micro_batches, watch_of(1.0))
    assert metrics["batch/padding/share"] == pytest.approx((1 + 2) / (19 + 3))


@pytest.mark.parametrize(("cap", "attention"), [(None, "varlen"), (2.0, "padded")])
def test_capped_scores_are_said_to_take_rectangles(
    world: World, monkeypatch: pytest.MonkeyPatch, cap: float | None, attention: str
) -> None:
    config = Gemma2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_logit_softcapping=cap,
    )
    monkeypatch.setattr(Platform, "of", lambda _: Platform(HOPPER))
    model = Gemma2ForCausalLM(config)  # type: ignore[no-untyped-call]
    told: list[str] = []
    monkeypatch.setattr("gradus.trainer.throughput.logger.info", lambda *it: told.append(str(it)))
    assert WorkMeter.build(model, world, torch.bfloat16, None).attention == attention
    assert attention in told[0]


def test_a_ring_counts_what_fills_up_the_pieces_of_samples() -> None:
    row = build_micro_batch([build_sample(9), build_sample(1)])
    layout: Any = {"attention": "padded", "dtype": torch.float32, "is_ring": True}
    assert padding_rows(row, **layout, context_size=2) == 6


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(200, 2048), min_size=8, max_size=64),
    num_ranks=st.sampled_from([1, 2, 4]),
    context_size=st.sampled_from([1, 2, 4]),
)
def test_layouts_of_gpus_waste_at_most_two_percent(
    lengths: list[int], num_ranks: int, context_size: int
) -> None:
    samples = [build_sample(length, seed=seed) for seed, length in enumerate(lengths)]
    layout: Any = {"attention": "varlen", "dtype": torch.bfloat16, "context_size": context_size}
    ranks = pack(samples, max_tokens=4096, num_ranks=num_ranks)
    padding = sum(padding_rows(m, **layout) for micro_batches in ranks for m in micro_batches)
    assert padding / (sum(lengths) + padding) <= 0.02

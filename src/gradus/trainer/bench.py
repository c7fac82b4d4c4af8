"""The trainer by itself on made-up samples: tokens per second, MFU, memory, time of each rung.

No inference, no orchestrator and no published weights; the model, the sharding, the loss and the
optimizer are those of the run.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradus.config import BenchConfig, TrainerProcessConfig
from gradus.files import write_json
from gradus.log import get_logger
from gradus.monitor.base import MonitorGroup
from gradus.monitor.console import BENCH_COLUMNS, ConsoleMonitor
from gradus.monitor.jsonl import JsonlMonitor
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import World, join_world
from gradus.trainer.losses import build_loss
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import build_policy, vocabulary_size
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.trainer.throughput import Stopwatch, WorkMeter
from gradus.trainer.trainer import learning_metrics, run_directory, serving_dtype
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

logger = get_logger(__name__)

RESULT_FILE = "bench.json"
"""In the run directory: the median of every metric over the measured steps."""


def run(config: TrainerProcessConfig) -> None:
    """Train on made-up samples; under torchrun, as one of the ranks."""
    trainer = config.trainer
    with join_world(deterministic=trainer.deterministic, parallel=trainer.parallel) as world:
        torch.manual_seed(config.seed)
        run_dir = run_directory(config.run_dir)
        monitor = _build_monitor(trainer.bench, run_dir, world)
        try:
            records = _measure(config, world, monitor)
        finally:
            monitor.close()
        if world.is_first:
            write_json(run_dir.root / RESULT_FILE, medians(records))


def fake_samples(config: BenchConfig, *, longest: int, vocabulary: int, seed: int) -> list[Sample]:
    """Random tokens, all but the first trained, with lengths as `config` says."""
    random = np.random.default_rng(seed)
    shortest = max(2, longest // 4) if config.ragged else longest
    lengths = random.integers(shortest, longest + 1, config.samples_per_step)
    return [_fake_sample(number, int(n), vocabulary, random) for number, n in enumerate(lengths)]


def medians(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every metric over all records."""
    return {name: statistics.median(r[name] for r in records) for name in records[0]}


def _fake_sample(number: int, length: int, vocabulary: int, random: np.random.Generator) -> Sample:
    mask = np.arange(length) > 0
    # Near those of a random model, so that no trust region drops tokens.
    logprobs = np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32)
    return Sample(
        id=f"fake-{number}",
        environment="fake",
        group_id="fake",
        episode_id=f"fake-{number}",
        reward=0.0,
        versions=VersionSpan(0, 0),
        token_ids=random.integers(0, vocabulary, length).astype(np.int32),
        loss_mask=mask,
        sampling_logprobs=logprobs,
        temperatures=np.ones(length, np.float32),
        advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
        reference_logprobs=np.full(length, np.nan, np.float32),
        loss_weights={"rl": mask.astype(np.float32)},
    )


def _measure(
    config: TrainerProcessConfig, world: World, monitor: MonitorGroup
) -> list[dict[str, float]]:
    """The metrics of every measured step."""
    trainer, bench = config.trainer, config.trainer.bench
    dtype = serving_dtype(trainer.compute_dtype)
    model = load_model(config.model, world.device)
    if trainer.lora is not None:
        add_adapters(model, trainer.lora, dtype)
    vocabulary = vocabulary_size(model)
    policy = shard_model(build_policy(model, trainer, world), world.mesh, dtype, trainer.parallel)
    meter = WorkMeter.build(model, world, dtype, trainer.peak_teraflops)
    loss = build_loss(trainer.loss)
    step = GradientStep(
        policy,
        loss,
        world,
        sync=trainer.parallel.gradient_sync,
        aggregation=trainer.loss.aggregation,
    )
    steps = bench.warmup_steps + bench.steps
    limits: dict[str, Any] = {"max_steps": steps, "max_skipped_steps": trainer.max_skipped_steps}
    optimizer = PolicyOptimizer(policy, trainer.optimizer, world=world, **limits)
    if world.is_first:
        ready_file = run_directory(config.run_dir).ready_file("trainer")
        write_json(ready_file, {"pid": os.getpid(), "term": config.term})
    longest = bench.sample_tokens or config.model.max_length_tokens
    records = []
    for number in range(steps):
        samples = fake_samples(bench, longest=longest, vocabulary=vocabulary, seed=number)
        ranks = pack(samples, max_tokens=trainer.micro_batch_tokens, num_ranks=world.data_size)
        micro_batches = ranks[world.data_rank]
        watch = Stopwatch(device=world.device)
        with watch.measure("forward_backward"):
            result = step.run(micro_batches)
        with watch.measure("optimize"):
            update = optimizer.step(number)
        learned = learning_metrics(result, update, watch, num_skipped=optimizer.num_skipped)
        metrics = learned | meter.measure(micro_batches, watch)
        monitor.record(metrics | {"batch/tokens/sum": float(result.tokens)}, step=number)
        if number >= bench.warmup_steps:
            records.append(metrics)
    return records


def _build_monitor(config: BenchConfig, run_dir: RunDirectory, world: World) -> MonitorGroup:
    if not world.is_first:
        return MonitorGroup([])
    steps = config.warmup_steps + config.steps
    console = ConsoleMonitor(sys.stderr, max_steps=steps, columns=BENCH_COLUMNS)
    return MonitorGroup([JsonlMonitor(run_dir.metrics), console])

"""The trainer by itself on made-up samples: tokens per second, MFU, memory, time of each rung.

No inference, no orchestrator and no published weights; the model, the sharding, the loss, the
optimizer and the ladder are those of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gradus.config import BenchConfig, RunProcessConfig
from gradus.files import write_json
from gradus.monitor import BENCH_COLUMNS, Monitor
from gradus.run.paths import RunDirectory
from gradus.trainer.batches import StepBatch, pack_own_share
from gradus.trainer.distributed import World, join_world, training_device
from gradus.trainer.ladder import Ladder, StepReport, build_monitor, write_ready_file
from gradus.trainer.learner import Learner
from gradus.wire.sample import Sample
from gradus.wire.tokens import TokenArrays
from gradus.wire.versions import VersionSpan

RESULT_FILE = "bench.json"
"""In the run directory: the median of every metric over the measured steps."""


def run(config: RunProcessConfig) -> None:
    """Train on made-up samples; under torchrun, as one of the ranks."""
    trainer, bench = config.trainer, config.trainer.bench
    num_steps = bench.warmup_steps + bench.steps
    with join_world(
        training_device(), deterministic=trainer.deterministic, parallel=trainer.parallel
    ) as world:
        torch.manual_seed(config.seed)
        run_dir = RunDirectory(Path(config.run_dir).absolute())
        monitor = build_monitor(run_dir, world, max_steps=num_steps, columns=BENCH_COLUMNS)
        with closing(monitor):
            records = _measure(config, world, run_dir, monitor)
        if world.is_first:
            write_json(run_dir.root / RESULT_FILE, medians(records))


def _measure(
    config: RunProcessConfig, world: World, run_dir: RunDirectory, monitor: Monitor
) -> list[Mapping[str, float]]:
    trainer, bench = config.trainer, config.trainer.bench
    num_steps = bench.warmup_steps + bench.steps
    learner = Learner.build(config.model, trainer, trainer.loss, max_steps=num_steps, world=world)
    batches = MadeUpBatches(
        bench,
        world,
        longest=bench.sample_tokens or config.model.max_length_tokens,
        max_tokens=trainer.micro_batch_tokens,
        vocabulary=learner.vocabulary,
    )
    records: list[Mapping[str, float]] = []

    def record(report: StepReport) -> None:
        monitor.record(report.metrics, step=report.step)
        if report.step >= bench.warmup_steps:
            records.append(report.metrics)

    write_ready_file(run_dir, config.term, world)
    Ladder(learner, batches, record=record).train(0, num_steps)
    return records


def medians(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in records) for name in records[0]}


@dataclass(frozen=True)
class MadeUpBatches:
    """Random samples, the same for the same step on every rank."""

    config: BenchConfig
    world: World
    longest: int
    max_tokens: int
    vocabulary: int

    def receive(self, step: int) -> StepBatch:
        """This rank's share of the samples of `step`."""
        samples = fake_samples(
            self.config, longest=self.longest, vocabulary=self.vocabulary, seed=step
        )
        mine = pack_own_share(
            samples, self.world, max_tokens=self.max_tokens, vocabulary=self.vocabulary
        )
        return StepBatch([mine], {"batch/tokens/sum": float(sum(map(len, samples)))})


def fake_samples(config: BenchConfig, *, longest: int, vocabulary: int, seed: int) -> list[Sample]:
    """Random tokens, all but the first trained, with lengths as `config` says."""
    random = np.random.default_rng(seed)
    shortest = max(2, longest // 4) if config.ragged else longest
    lengths = random.integers(shortest, longest + 1, config.samples_per_step)
    return [_fake_sample(number, int(n), vocabulary, random) for number, n in enumerate(lengths)]


def _fake_sample(number: int, length: int, vocabulary: int, random: np.random.Generator) -> Sample:
    mask = np.arange(length) > 0
    # Near those of a random model, so that no trust region drops tokens.
    logprobs = np.where(mask, -np.log(vocabulary), 0.0)
    return Sample(
        id=f"fake-{number}",
        environment="fake",
        group_id="fake",
        episode_id=f"fake-{number}",
        reward=0.0,
        versions=VersionSpan(0, 0),
        arrays=TokenArrays.build(
            random.integers(0, vocabulary, length),
            {"rl": mask.astype(np.float32)},
            sampling_logprobs=logprobs,
            advantages=np.where(mask, random.normal(), 0.0),
        ),
    )

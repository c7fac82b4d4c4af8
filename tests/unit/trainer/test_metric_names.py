"""The catalogue and the code of the trainer know the same metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build_sample
from configs import build_loss_config, build_run_process
from image_families import CPU, plain_image_model, seen
from metric_names import families_in_the_catalogue, families_of
from tiny_experts import build_tiny_moe_model

from gradus.config import (
    ModelConfig,
    SftDataConfig,
    SftProcessConfig,
    TrainerConfig,
)
from gradus.config.schema.sft import SftValidationConfig
from gradus.monitor.metric_table import Maker
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import join_world
from gradus.trainer.entry import rl, sft
from gradus.trainer.throughput import Stopwatch, WorkMeter
from gradus.transport import SpoolSender
from gradus.wire.events import StepFinished
from gradus.wire.micro_batch import Batch, MicroBatch
from gradus.wire.packing import pack
from gradus.wire.tokens import LOSS_NAMES
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch


async def rl_names(root: Path, model: Path) -> set[str]:
    """Of two steps with tokens of every component, fresh and stale ones, two sources, and with a
    loss that measures all it can."""
    samples = [build_sample(9, seed=number, id=name) for number, name in enumerate(LOSS_NAMES)]
    for sample in samples:
        sample.arrays.loss_weights[sample.id] = sample.arrays.loss_weights.pop("rl")
        sample.arrays.reference_logprobs[:] = -1.0
    sender = SpoolSender(RunDirectory(root), 0)
    ranks = pack(samples, max_tokens=40, num_ranks=1)
    for step in range(2):
        await sender.send(Batch(step, 0, VersionSpan(0, 0), ranks))
    loss = build_loss_config(importance_sampling="truncated", reference_kl_coefficient=0.1)
    trainer = TrainerConfig(
        compute_dtype="float32",
        loss=loss,
        peak_teraflops=0.5,
        recompute_logprobs=True,
    )
    base = ModelConfig(name=str(model))
    envs = [{"id": "gradus-reverse-text", "name": name} for name in ("words", "sums")]
    changes = {"orchestrator": {"train": {"env": envs}}, "model": base, "max_steps": 2}
    rl.run(build_run_process(root, {**changes, "trainer": trainer}))
    names: set[str] = set()
    for _ in range(2):
        while not isinstance(event := await sender.receive_event(), StepFinished):
            pass
        names |= set(event.metrics)
    return names


def sft_names(root: Path, model: Path) -> set[str]:
    """Of a supervised step of a mixture of experts, with a validation."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = root / "data.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text(json.dumps(row) + "\n")
    config: dict[str, Any] = {
        "model": ModelConfig(name=str(model), max_length_tokens=64),
        "data": SftDataConfig(path=str(data)),
        "validation": SftValidationConfig(path=str(data), interval_steps=1),
    }
    sft.run(
        SftProcessConfig(
            **config,
            run_dir=str(root / "run"),
            term=0,
            max_steps=1,
            batch_conversations=1,
            micro_batch_tokens=64,
            compute_dtype="float32",
        )
    )
    record = json.loads((root / "run" / "metrics.jsonl").read_text().splitlines()[0])
    return set(record) - {"step", "time"}


def image_names() -> set[str]:
    """Of the work of a model that reads images."""
    found = [seen(80, (5, (8, 12))), seen(80, (9, (16, 16)))]
    batch = [MicroBatch.join([it.sample]) for it in found]
    with join_world(CPU) as world:
        meter = WorkMeter.build(plain_image_model("qwen3_vl"), world, torch.float32, None)
        measured = meter.measure(batch, Stopwatch())
    assert measured["batch/patches/max"] == 16 * 16
    return set(measured)


async def test_the_trainer_s_metrics_and_entries_are_the_same(
    tmp_path: Path, tiny_model: Path
) -> None:
    names = image_names() | await rl_names(tmp_path / "rl", tiny_model)
    names |= sft_names(tmp_path / "sft", build_tiny_moe_model(tmp_path / "moe"))
    assert families_of(names) >= families_in_the_catalogue(Maker.TRAINER)

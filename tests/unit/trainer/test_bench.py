"""The trainer measured by itself, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import build_run_process

from gradus.config import BenchConfig, ModelConfig, RunProcessConfig, TrainerConfig
from gradus.run.paths import RunDirectory
from gradus.trainer.entry.bench import RESULT_FILE, fake_samples, medians, run
from gradus.trainer.tensors import check_trainable
from gradus.wire.packing import pack

pytestmark = pytest.mark.torch


def build_config(root: Path, model: Path, **trainer: Any) -> RunProcessConfig:
    bench = BenchConfig(steps=2, warmup_steps=1, samples_per_step=3, sample_tokens=20)
    changes = {
        "model": ModelConfig(name=str(model)),
        "max_steps": 1,
        "trainer": TrainerConfig(bench=bench, compute_dtype="float32", **trainer),
    }
    return build_run_process(root, changes)


def test_a_measured_trainer_leaves_its_medians(tmp_path: Path, tiny_model: Path) -> None:
    run(build_config(tmp_path, tiny_model, peak_teraflops=0.5))
    result = json.loads((tmp_path / RESULT_FILE).read_text())
    assert result["throughput/trained_tokens_per_second"] > 0
    assert 0 < result["throughput/mfu/share"] < 1
    assert result["throughput/peak_memory_gib"] > 0.1
    assert 0 <= result["batch/padding/share"] < 1
    assert {"time/forward_backward_seconds", "time/optimize_seconds"} <= result.keys()
    assert np.isfinite(list(result.values())).all()
    run_dir = RunDirectory(tmp_path)
    assert len(run_dir.metrics.read_text().splitlines()) == 3
    assert run_dir.ready_file("trainer").exists()


def test_adapters_are_measured_too(tmp_path: Path, tiny_model: Path) -> None:
    run(build_config(tmp_path, tiny_model, lora={"rank": 2}))
    assert "throughput/mfu/share" not in json.loads((tmp_path / RESULT_FILE).read_text())


@pytest.mark.parametrize("ragged", [True, False])
def test_made_up_samples_can_train_and_are_as_long_as_asked(ragged: bool) -> None:
    config = BenchConfig(samples_per_step=12, ragged=ragged)
    samples = fake_samples(config, longest=40, vocabulary=50, seed=1)
    lengths = {len(sample) for sample in samples}
    assert lengths <= set(range(10, 41)) if ragged else lengths == {40}
    for micro_batch in pack(samples, max_tokens=64, num_ranks=1)[0]:
        check_trainable(micro_batch, vocabulary=50)


def test_the_same_seed_makes_the_same_samples_on_every_rank() -> None:
    config = BenchConfig(samples_per_step=2)
    first, again = (fake_samples(config, longest=9, vocabulary=50, seed=3) for _ in range(2))
    assert all(
        np.array_equal(a.arrays.token_ids, b.arrays.token_ids)
        for a, b in zip(first, again, strict=True)
    )


def test_medians_ignore_one_slow_step() -> None:
    records = [{"seconds": 1.0}, {"seconds": 9.0}, {"seconds": 1.2}]
    assert medians(records) == {"seconds": 1.2}

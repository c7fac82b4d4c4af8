"""Whole trainer runs: events in order, weights that move, and ranks that agree."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import build_sample
from commands import wait_until
from configs import build_run_process
from safetensors.torch import load_file

from gradus.config import (
    AdamWConfig,
    ModelConfig,
    RunProcessConfig,
    ServedLoraConfig,
    TrainerConfig,
)
from gradus.errors import DeadlineError, FencedError, GradusError, RunDirectoryError
from gradus.orchestrator.groups.packing import Layout, build_batch, split_by_group
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.trainer.entry.rl import run
from gradus.transport import SpoolSender
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import BASE_FILE, verify_version
from gradus.weights.receiver import StreamReceiver
from gradus.weights.rendezvous import Backend
from gradus.weights.stream import is_stream
from gradus.wire.events import (
    CheckpointStaged,
    Event,
    PolicyPublished,
    StepFinished,
    TrainerDone,
)
from gradus.wire.micro_batch import Batch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch

RunTrainer = Callable[[RunProcessConfig], None]
STEPS = 4
WEIGHT_TOLERANCE = 1e-3
"""Largest difference of a weight, relative to how far training moved its tensor. Float32 sums in
another order differ in the last bits (1.3e-4 was seen)."""


def build_config(root: Path, model: Path, **trainer: Any) -> RunProcessConfig:
    settings = {
        "compute_dtype": "float32",
        "optimizer": AdamWConfig(lr=1e-3),
        "deterministic": True,
        **trainer,
    }
    changes = {
        "model": ModelConfig(name=str(model)),
        "max_steps": STEPS,
        "trainer": TrainerConfig(**settings),
    }
    return build_run_process(root, changes)


def keeping_all(config: RunProcessConfig) -> RunProcessConfig:
    """With room for every published version."""
    section = config.orchestrator.model_copy(update={"max_lag": STEPS})
    return config.model_copy(update={"orchestrator": section})


def samples_of(step: int) -> list[Sample]:
    random = np.random.default_rng(step)
    return [
        build_sample(
            int(random.integers(4, 20)),
            seed=10 * step + i,
            advantage=float(random.normal()),
            id=f"{step}-{i}",
        )
        for i in range(10)
    ]


def poison(sample: Sample) -> None:
    """Make the gain overflow on tokens that no trust region drops."""
    sample.arrays.sampling_logprobs[sample.arrays.loss_mask] = -110.0
    sample.arrays.advantages[sample.arrays.loss_mask] = -3e38


async def send_batches(
    root: Path, *, num_ranks: int = 1, steps: int = STEPS, poisoned: Sequence[int] = ()
) -> Any:
    """Lay all batches into the spool before the trainer starts; gives the sender.

    One sample of each step in `poisoned` makes its gradient infinite.
    """
    sender = SpoolSender(RunDirectory(root), 0)
    for step in range(steps):
        samples = samples_of(step)
        if step in poisoned:
            poison(samples[0])
        ranks = pack(samples, max_tokens=40, num_ranks=num_ranks)
        await sender.send(Batch(step, 0, VersionSpan(0, step), ranks))
    return sender


async def events_of(sender: Any) -> list[Event]:
    events = [await sender.receive_event()]
    while not isinstance(events[-1], TrainerDone):
        events.append(await sender.receive_event())
    return events


async def all_events(sender: Any, root: Path) -> list[Event]:
    """Those that lie in the spool."""
    lying = list((RunDirectory(root).spool / "events").glob("*.msgpack"))
    return [await sender.receive_event() for _ in lying]


async def test_events_of_a_run_come_in_their_order(tmp_path: Path, tiny_model: Path) -> None:
    sender = await send_batches(tmp_path)
    run(keeping_all(build_config(tmp_path, tiny_model)))
    events = await events_of(sender)
    expected = [PolicyPublished, StepFinished] * STEPS
    assert [type(event) for event in events] == [*expected, CheckpointStaged, TrainerDone]
    finished = [event for event in events if isinstance(event, StepFinished)]
    assert [event.is_saved for event in finished] == [False] * (STEPS - 1) + [True]
    published = [event for event in events if isinstance(event, PolicyPublished)]
    assert [event.version for event in published] == [1, 2, 3, 4]
    for event in published:
        assert verify_version(Path(event.directory), event.digest).label.version == event.version
    assert events[-1] == TrainerDone(step=STEPS - 1, term=0)


def follow(run_dir: RunDirectory, backend: Backend) -> dict[str, torch.Tensor]:
    """Receive or read every version as an inference worker would; gives the last."""
    worker = StreamReceiver(0, torch.device("cpu"), backend=backend, timeout_seconds=60.0)
    tensors: dict[str, torch.Tensor] = {}
    for version in range(1, STEPS + 1):
        folder = run_dir.version(version)
        wait_until(folder.is_dir, timeout_seconds=60.0, what=f"version {version}")
        is_sent = is_stream(folder)
        tensors = dict(
            worker.receive(folder) if is_sent else load_file(folder / "model.safetensors").items()
        )
    return tensors


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
async def test_every_version_of_a_run_is_broadcast_or_goes_through_files(
    backend: Backend, tmp_path: Path, tiny_model: Path
) -> None:
    sender = await send_batches(tmp_path)
    run_dir = RunDirectory(tmp_path)
    given = {"weight_transfer": "broadcast", "broadcast_backend": backend}
    config = keeping_all(build_config(tmp_path, tiny_model, **given))
    with ThreadPoolExecutor() as threads:
        following = threads.submit(follow, run_dir, backend)
        run(config)
        received = following.result(60)
    await events_of(sender)
    trained = load_file(run_dir.model / "model.safetensors")
    assert received.keys() == trained.keys()
    assert all(torch.equal(received[name], value) for name, value in trained.items())
    said = run_dir.notices.read_text() if run_dir.notices.exists() else ""
    assert ("the torch of the trainer was built without nccl" in said) == (backend == "nccl")


async def test_a_replay_of_fewer_steps_goes_by_the_schedule_of_all(
    tmp_path: Path, tiny_model: Path
) -> None:
    linear = AdamWConfig(lr=1e-3, schedule="linear")
    rates = {}
    for name, num_steps in (("whole", None), ("part", 2)):
        sender = await send_batches(tmp_path / name)
        config = build_config(tmp_path / name, tiny_model, optimizer=linear)
        run(config.model_copy(update={"num_steps": num_steps}))
        events = await events_of(sender)
        finished = [event for event in events if isinstance(event, StepFinished)]
        rates[name] = [event.metrics["optimizer/lr"] for event in finished]
        assert events[-1] == TrainerDone(step=(num_steps or STEPS) - 1, term=0)
    assert rates["part"] == rates["whole"][:2]


async def test_metrics_of_a_step_are_complete_and_finite(tmp_path: Path, tiny_model: Path) -> None:
    sender = await send_batches(tmp_path)
    run(build_config(tmp_path, tiny_model))
    finished = [e for e in await events_of(sender) if isinstance(e, StepFinished)]
    required = {
        "loss/total/mean",
        "loss/rl/mean",
        "loss/mismatch_kl/mean",
        "loss/entropy/mean",
        "loss/dropped_tokens/share",
        "optimizer/grad_norm",
        "optimizer/lr",
        "optimizer/skipped/total",
        "weights/version",
        "weights/publish_seconds",
        "time/step_seconds",
        "time/receive_seconds",
        "time/forward_backward_seconds",
        "time/optimize_seconds",
        "throughput/trained_tokens_per_second",
    }
    for event in finished:
        assert required <= event.metrics.keys()
        assert np.isfinite(list(event.metrics.values())).all()
    assert finished[-1].metrics["weights/version"] == STEPS


async def test_the_final_model_is_the_last_version(tmp_path: Path, tiny_model: Path) -> None:
    await send_batches(tmp_path)
    run(build_config(tmp_path, tiny_model))
    run_dir = RunDirectory(tmp_path)
    final = load_file(run_dir.model / "model.safetensors")
    last = load_file(run_dir.version(STEPS) / "model.safetensors")
    first = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(final[name], last[name]) for name in last)
    assert any(not torch.equal(final[name], first[name]) for name in first)
    assert json.loads(run_dir.ready_file("trainer").read_text())["pid"] == os.getpid()


async def test_a_deterministic_run_repeats_bit_by_bit(tmp_path: Path, tiny_model: Path) -> None:
    contents = []
    for name in ("one", "two"):
        await send_batches(tmp_path / name)
        run(build_config(tmp_path / name, tiny_model, compute_dtype="bfloat16"))
        contents.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]


async def test_a_version_that_cannot_be_written_ends_the_run_and_is_not_announced(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Its name is taken, as by another process that publishes for the same run."""
    sender = await send_batches(tmp_path)
    weights = FilesystemWeights(RunDirectory(tmp_path), term=0, extra_files={})
    taken = weights.publish_version(2, [("w", torch.zeros(1))]).directory
    # A link, since what lies there itself is taken for an earlier process's of this term.
    taken.rename(tmp_path / "elsewhere")
    taken.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="version_00000002 has the digest"):
        run(build_config(tmp_path, tiny_model))
    events = await all_events(sender, tmp_path)
    assert [e.version for e in events if isinstance(e, PolicyPublished)] == [1]
    assert [e.step for e in events if isinstance(e, StepFinished)] == [0]
    assert not any(isinstance(e, TrainerDone) for e in events)


async def test_a_version_that_cannot_be_written_ends_the_wait_for_the_next_batch(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Without the version the orchestrator has nothing to play, so the batch would never come."""
    await send_batches(tmp_path, steps=1)
    weights = FilesystemWeights(RunDirectory(tmp_path), term=0, extra_files={})
    weights.publish_version(1, [("w", torch.zeros(1))])
    began = time.monotonic()
    with pytest.raises(RunDirectoryError, match="version_00000001 has the digest"):
        run(build_config(tmp_path, tiny_model))
    assert time.monotonic() - began < 60


@pytest.mark.shows("F32", "I6")
async def test_a_newer_owner_ends_the_trainer_and_nothing_is_announced(
    tmp_path: Path, tiny_model: Path
) -> None:
    await send_batches(tmp_path)
    lease = RunLease.take(RunDirectory(tmp_path))
    with pytest.raises(FencedError, match="term 1"):
        run(build_config(tmp_path, tiny_model))
    lease.release()
    assert not RunDirectory(tmp_path).version(1).exists()


async def test_a_missing_batch_is_a_deadline(tmp_path: Path, tiny_model: Path) -> None:
    await send_batches(tmp_path, steps=1)
    with pytest.raises(DeadlineError, match="batch 1"):
        run(build_config(tmp_path, tiny_model), longest_wait_seconds=0.2)


@pytest.mark.shows("F39")
async def test_gradients_that_stay_non_finite_end_the_run(tmp_path: Path, tiny_model: Path) -> None:
    await send_batches(tmp_path, steps=5, poisoned=range(5))
    config = build_config(tmp_path, tiny_model).model_copy(update={"max_steps": 6})
    with pytest.raises(GradusError, match="5 steps in a row"):
        run(config)
    skipped = load_file(RunDirectory(tmp_path).version(4) / "model.safetensors")
    first = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(skipped[name], first[name]) for name in first)


@pytest.mark.shows("F39")
async def test_two_ranks_give_the_weights_of_one_and_skip_together(
    tmp_path: Path, tiny_model: Path, run_two_ranks: RunTrainer
) -> None:
    """Step 1 has one poisoned sample, which only one of two ranks gets to see."""
    await send_batches(tmp_path / "one", poisoned=(1,))
    run(build_config(tmp_path / "one", tiny_model))
    sender = await send_batches(tmp_path / "two", num_ranks=2, poisoned=(1,))
    run_two_ranks(build_config(tmp_path / "two", tiny_model, num_processes=2))
    finished = [e for e in await events_of(sender) if isinstance(e, StepFinished)]
    assert [event.metrics["optimizer/skipped/total"] for event in finished] == [0, 1, 1, 1]
    one = load_file(tmp_path / "one" / "model" / "model.safetensors")
    two = load_file(tmp_path / "two" / "model" / "model.safetensors")
    start = load_file(tiny_model / "model.safetensors")
    for name in one:
        moved = float((one[name] - start[name]).abs().max())
        assert float((one[name] - two[name]).abs().max()) <= WEIGHT_TOLERANCE * moved, name


@pytest.mark.parametrize("serve", ["adapter", "merged"])
async def test_a_run_with_adapters_publishes_them_or_the_merged_weights(
    tmp_path: Path, tiny_model: Path, serve: Any
) -> None:
    await send_batches(tmp_path)
    run(build_config(tmp_path, tiny_model, lora=ServedLoraConfig(rank=4, serve=serve)))
    run_dir = RunDirectory(tmp_path)
    published = {path.name for path in run_dir.version(STEPS).iterdir()}
    adapter = {"adapter_model.safetensors", "adapter_config.json", BASE_FILE}
    final = load_file(run_dir.model / "model.safetensors")
    assert {path.name for path in run_dir.adapter.iterdir()} == adapter
    if serve == "adapter":
        assert published == adapter | {"manifest.json"}
        assert (run_dir.version(STEPS) / "adapter_model.safetensors").read_bytes() == (
            run_dir.adapter / "adapter_model.safetensors"
        ).read_bytes()
        return
    last = load_file(run_dir.version(STEPS) / "model.safetensors")
    first = load_file(tiny_model / "model.safetensors")
    assert last.keys() == first.keys()
    assert all(torch.equal(final[name], last[name]) for name in last)
    moved = {name for name in first if not torch.equal(last[name], first[name])}
    assert moved
    assert all("_proj." in name for name in moved)


async def test_two_ranks_train_the_adapter_of_one(
    tmp_path: Path, tiny_model: Path, run_two_ranks: RunTrainer
) -> None:
    lora = ServedLoraConfig(rank=3)  # does not split evenly
    await send_batches(tmp_path / "one")
    run(build_config(tmp_path / "one", tiny_model, lora=lora))
    await send_batches(tmp_path / "two", num_ranks=2)
    config = build_config(tmp_path / "two", tiny_model, lora=lora, num_processes=2)
    run_two_ranks(config)
    one, two = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name in one:
        largest = float(one[name].abs().max())
        assert float((one[name] - two[name]).abs().max()) <= 1e-2 * largest, name


async def test_updates_of_one_batch_are_those_of_as_many_batches(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Two parts of each batch, published once behind the second; and the parts as batches."""
    rate = {"optimizer": AdamWConfig(lr=1e-3)}
    sender = SpoolSender(RunDirectory(tmp_path / "parts"), 0)
    for step in range(STEPS):
        layout = Layout(1, max_tokens=40, num_updates=2)
        await sender.send(build_batch(samples_of(step), step=step, term=0, layout=layout))
    run(build_config(tmp_path / "parts", tiny_model, **rate))
    events = await events_of(sender)
    published = [event.version for event in events if isinstance(event, PolicyPublished)]
    assert published == [1, 2, 3, 4]
    sender = SpoolSender(RunDirectory(tmp_path / "batches"), 0)
    parts = [part for step in range(STEPS) for part in split_by_group(samples_of(step), 2)]
    for step, part in enumerate(parts):
        layout = Layout(1, max_tokens=40)
        await sender.send(build_batch(part, step=step, term=0, layout=layout))
    config = build_config(tmp_path / "batches", tiny_model, **rate)
    run(config.model_copy(update={"max_steps": 2 * STEPS}))
    single = [e.metrics for e in await events_of(sender) if isinstance(e, StepFinished)]
    model = "model/model.safetensors"
    assert (tmp_path / "parts" / model).read_bytes() == (tmp_path / "batches" / model).read_bytes()
    both = [event.metrics for event in events if isinstance(event, StepFinished)]
    for step, metrics in enumerate(both):
        first, second = single[2 * step], single[2 * step + 1]
        for name in ("loss/total/mean", "optimizer/grad_norm", "loss/mismatch_kl/mean"):
            assert metrics[name] == pytest.approx((first[name] + second[name]) / 2)
        assert metrics["loss/ratio/max"] == max(first["loss/ratio/max"], second["loss/ratio/max"])

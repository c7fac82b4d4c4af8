"""Which versions of a supervised run are published for evaluation, and who hears of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradus.config import (
    CheckpointConfig,
    LoraConfig,
    ModelConfig,
    SftDataConfig,
    SftEvalConfig,
    SftProcessConfig,
)
from gradus.config.schema import environment
from gradus.files import write_json
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.entry import evaluated_versions
from gradus.trainer.entry.sft import run
from gradus.transport import SpoolSender
from gradus.weights.filesystem import published_versions
from gradus.weights.published import verify_version
from gradus.wire.events import Event, PolicyPublished, TrainerDone

pytestmark = pytest.mark.torch


def build_config(
    root: Path, model: Path, *, resume_step: int | None = None, **options: Any
) -> SftProcessConfig:
    data = root.with_name("data.jsonl")
    data.write_text("".join(json.dumps({"prompt": x, "completion": x * 3}) + "\n" for x in "abcd"))
    section = {"env": [{"id": "words"}], "interval_steps": 2, **options.pop("eval", {})}
    settings = {
        "model": ModelConfig(name=str(model), max_length_tokens=64),
        "data": SftDataConfig(path=str(data)),
        "eval": SftEvalConfig.model_validate(section),
        "max_steps": 3,
        "batch_conversations": 2,
        "micro_batch_tokens": 64,
        "compute_dtype": "float32",
        **options,
    }
    term = 0 if resume_step is None else 1
    return SftProcessConfig(run_dir=str(root), term=term, resume_step=resume_step, **settings)


def events_of(root: Path, term: int = 0) -> list[Event]:
    """What the evaluator hears, until the trainer is done."""

    async def receive() -> list[Event]:
        sender = SpoolSender(RunDirectory(root), term)
        events: list[Event] = []
        while not (events and isinstance(events[-1], TrainerDone)):
            async with asyncio.timeout(60):
                events.append(await sender.receive_event())
        return events

    return asyncio.run(receive())


def versions_in(events: list[Event]) -> list[int]:
    return [event.version for event in events if isinstance(event, PolicyPublished)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_only_versions_that_are_due_are_published_and_none_is_forgotten(
    root: Path, tiny_model: Path
) -> None:
    run(build_config(root, tiny_model))
    events = events_of(root)
    assert versions_in(events) == [2, 3]
    assert isinstance(events[-1], TrainerDone)
    for event in events[:-1]:
        assert isinstance(event, PolicyPublished)
        version = verify_version(Path(event.directory), event.digest)
        assert {"config.json", "model.safetensors"} <= set(version.files)
    rows = [json.loads(line) for line in RunDirectory(root).metrics.read_text().splitlines()]
    assert all(row["time/publish_seconds"] >= 0 for row in rows)


def test_the_last_version_holds_the_weights_of_the_final_model(
    root: Path, tiny_model: Path
) -> None:
    run(build_config(root, tiny_model))
    published = load_file(RunDirectory(root).version(3) / "model.safetensors")
    saved = load_file(RunDirectory(root).model / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)


def test_publishing_changes_nothing_of_what_is_learned(root: Path, tiny_model: Path) -> None:
    run(build_config(root, tiny_model, deterministic=True))
    config = build_config(root.with_name("without"), tiny_model, deterministic=True)
    run(config.model_copy(update={"eval": None}))
    names = [root / "model", root.with_name("without") / "model"]
    ours, theirs = [(name / "model.safetensors").read_bytes() for name in names]
    assert ours == theirs


def test_adapters_are_evaluated_merged(root: Path, tiny_model: Path) -> None:
    run(build_config(root, tiny_model, lora=LoraConfig(rank=2)))
    published = load_file(RunDirectory(root).version(3) / "model.safetensors")
    saved = load_file(RunDirectory(root).model / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)


def test_a_full_disk_waits_for_an_evaluation_and_then_takes_the_next_version(
    root: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 2 lies on the disk; it is full until somebody looks for the third time."""
    looks: list[Path] = []

    def free_bytes(path: Path) -> int:
        looks.append(path)
        return 0 if len(looks) < 3 else 1 << 40

    monkeypatch.setattr(evaluated_versions, "free_bytes", free_bytes)
    monkeypatch.setattr(evaluated_versions, "ROOM_PAUSE_SECONDS", 0.0)
    run(build_config(root, tiny_model))
    assert len(looks) == 3, "nothing waits when version 2 comes, so nobody looks"
    assert caplog.text.count("version 3 waits for room on a full disk") == 1
    assert versions_in(events_of(root)) == [2, 3]


def test_a_full_disk_is_waited_for_no_longer_than_an_evaluation_may_take(
    root: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluated_versions, "free_bytes", lambda _: 0)
    monkeypatch.setattr(evaluated_versions, "ROOM_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(environment, "APPLY_SECONDS", 1e-3)
    run(build_config(root, tiny_model, eval={"timeout_seconds": 1e-3}))
    assert versions_in(events_of(root)) == [2, 3]


def test_without_an_evaluation_nothing_is_published(root: Path, tiny_model: Path) -> None:
    config = build_config(root, tiny_model)
    run(config.model_copy(update={"eval": None}))
    assert not RunDirectory(root).weights.exists()
    assert "time/publish_seconds" not in RunDirectory(root).metrics.read_text()


def stop_at_checkpoint_2(root: Path, model: Path) -> RunDirectory:
    """A run of three steps that continues from checkpoint 2, as the launcher prepares it."""
    run(build_config(root, model, checkpoint=CheckpointConfig(interval_steps=2)))
    run_dir = RunDirectory(root)
    CheckpointStore(run_dir, 0).discard(3)
    for path in (run_dir.spool / "events").iterdir():
        path.unlink()
    for path in run_dir.version(3).iterdir():
        path.unlink()
    run_dir.version(3).rmdir()
    return run_dir


def go_on(root: Path, model: Path) -> list[int]:
    checkpoint = CheckpointConfig(interval_steps=2)
    run(build_config(root, model, resume_step=2, checkpoint=checkpoint))
    return versions_in(events_of(root, term=1))


def test_after_a_restart_what_waits_is_announced_again(root: Path, tiny_model: Path) -> None:
    run_dir = stop_at_checkpoint_2(root, tiny_model)
    before = [published.digest for published in published_versions(run_dir)]
    assert go_on(root, tiny_model) == [2, 3]
    after = [published.digest for published in published_versions(run_dir)]
    assert after[0] == before[0], "published once"


def test_after_a_restart_the_version_of_the_checkpoint_is_published_when_it_is_missing(
    root: Path, tiny_model: Path
) -> None:
    run_dir = stop_at_checkpoint_2(root, tiny_model)
    version = run_dir.version(2)
    expected = (version / "model.safetensors").read_bytes()
    for path in version.iterdir():
        path.unlink()
    version.rmdir()
    assert go_on(root, tiny_model) == [2, 3]
    assert (version / "model.safetensors").read_bytes() == expected


def test_after_a_restart_a_measured_version_is_not_published_again(
    root: Path, tiny_model: Path
) -> None:
    run_dir = stop_at_checkpoint_2(root, tiny_model)
    version = run_dir.version(2)
    for path in version.iterdir():
        path.unlink()
    version.rmdir()
    write_json(run_dir.evaluation(2), {"eval/version": 2.0})
    assert go_on(root, tiny_model) == [3]

"""The orchestrator keeps what a replay needs, and continues when a disk does not take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import build_sample

from gradus.config import ModelConfig
from gradus.files import read_json
from gradus.orchestrator.groups.packing import digest_samples, first_difference
from gradus.orchestrator.records.recording import (
    EpisodeRecording,
    PlayedState,
    digest_model,
    load_played,
    open_recording,
)
from gradus.orchestrator.types import PlayedEpisode
from gradus.run.paths import RunDirectory
from gradus.run.recording import LaunchRecord, iter_entries, read_body
from gradus.testing.episodes import build_episode
from gradus.wire.codec import decode
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan


def played(number: int, *, reward: float = 1.0) -> PlayedEpisode:
    episode = build_episode(reward=reward, seed=number)
    return PlayedEpisode(f"g000000.{number}", "g000000", VersionSpan(1, 2), episode=episode)


def record_in(root: Path) -> LaunchRecord:
    return LaunchRecord(RunDirectory(root), term=1)


def read_all(record: LaunchRecord) -> list[PlayedEpisode]:
    with record.episodes.open("rb") as file:
        bodies = [read_body(file, e, record.episodes) for e in iter_entries(record.episodes)]
    return [load_played(decode(body, PlayedState)) for body in bodies]


def test_an_episode_comes_back_with_its_tokens_and_versions(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    recording = EpisodeRecording(record, ModelConfig(name="absent"))
    recording.add(played(0, reward=0.25))
    recording.add(PlayedEpisode("g000000.1", "g000000", VersionSpan(1, 1)))
    recording.finish()
    recording.close()
    first, second = read_all(record)
    assert first.episode is not None
    assert (
        first.episode.traces[0].nodes[1].token_ids == played(0).episode.traces[0].nodes[1].token_ids
    )  # type: ignore[union-attr]
    assert (first.episode.traces[0].reward, first.versions) == (0.25, VersionSpan(1, 2))
    assert (second.episode, second.outcome) == (None, "cancelled")


def test_the_initial_weights_are_digested_beside_the_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    record = record_in(tmp_path / "run")
    recording = EpisodeRecording(record, ModelConfig(name=str(model)))
    recording.finish()
    recording.close()
    assert read_json(record.model) == digest_model(str(model)) != {}


@pytest.mark.shows("F24")
def test_a_disk_that_is_full_costs_the_replay_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_in(tmp_path)
    recording = EpisodeRecording(record, ModelConfig(name="absent"))
    recording.add(played(0))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradus.run.recording.EpisodeLog.append", full)
    recording.add(played(1))
    monkeypatch.undo()
    recording.add(played(2))
    recording.finish()
    assert [it.id for it in read_all(record)] == ["g000000.0"]
    assert "No space left on device): this run cannot be replayed" in caplog.text


def test_recording_can_be_switched_off(tmp_path: Path, base_config: Any) -> None:
    assert open_recording(base_config(tmp_path, recording=False)) is None
    assert list(tmp_path.iterdir()) == []


def test_recording_is_on_unless_switched_off(tmp_path: Path, base_config: Any) -> None:
    recording = open_recording(base_config(tmp_path))
    assert recording is not None
    recording.finish()
    recording.close()
    assert record_in(tmp_path).episodes.exists()


def test_a_digest_changes_with_its_own_field_only() -> None:
    sample = build_sample(seed=1)
    changed = sample.with_arrays(advantages=sample.arrays.advantages * np.float32(2))
    before, after = digest_samples([sample]), digest_samples([changed])
    assert first_difference(before, after) == "advantages"
    assert {name for name in before if before[name] != after[name]} == {"advantages"}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (build_sample(seed=1, versions=VersionSpan(0, 1)), "versions"),
        (build_sample(seed=1).with_arrays(loss_weights={}), "loss_weights.rl"),
        (build_sample(7, seed=1), "advantages"),
    ],
)
def test_each_kind_of_difference_has_a_name(changed: Sample, field: str) -> None:
    found = first_difference(digest_samples([build_sample(seed=1)]), digest_samples([changed]))
    assert found == field


def test_the_order_of_samples_counts_and_equal_batches_are_equal() -> None:
    one, two = build_sample(seed=1), build_sample(seed=2)
    assert digest_samples([one, two]) == digest_samples([build_sample(seed=1), two])
    assert digest_samples([one, two]) != digest_samples([two, one])


async def test_the_journal_names_what_was_graded_and_what_a_batch_holds(build_rig: Any) -> None:
    rig = build_rig(max_steps=2)
    await rig.play()
    shipped = rig.events("batch_shipped")
    graded = {line["group"]: line["samples"] for line in rig.events("group_graded")}
    for line, batch in zip(shipped, rig.trainer.batches, strict=True):
        assert line["samples"] == [s for group in line["groups"] for s in graded[group]]
        assert sum(len(m.sample_ids) for m in batch.ranks[0]) == len(line["samples"])
        assert {"token_ids", "advantages", "versions"} <= line["digests"].keys()

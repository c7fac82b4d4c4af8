"""Recorded runs are cut and trained again, and what differs is named."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import ScriptedEnvironment, ScriptedTrainer, at_once

from gradus.config import RunProcessConfig
from gradus.errors import ConfigError, CorruptStateError, DeadlineError, ReplayError
from gradus.files import read_json, write_json
from gradus.orchestrator.records.recording import EpisodeRecording, digest_model, open_recording
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus.run.recording import LaunchRecord, note_launch
from gradus.testing.episodes import build_episode
from gradus.wire.codec import encode
from gradus.wire.micro_batch import Batch
from gradus_lab.replay.batches import BatchMaker
from gradus_lab.replay.recording import (
    RecordedEpisodes,
    RecordedRun,
    open_recorded_run,
    read_learned,
)
from gradus_lab.replay.replayer import Comparison, Replayer, compare_models

STEPS = 3


@dataclass
class Monitor:
    records: list[int] = field(default_factory=list)

    def record(self, metrics: Any, *, step: int) -> None:
        self.records.append(step)

    def close(self) -> None:
        """Nothing is held open."""


async def wait_by_number(number: int) -> None:
    """Episodes end in another order than they start."""
    for _ in range(random.Random(number).randrange(12)):
        await asyncio.sleep(0)


@pytest.fixture
async def rig(build_rig: Any, tmp_path: Path) -> Any:
    """A finished asynchronous run of three steps with everything that a replay reads."""
    environment = ScriptedEnvironment(
        wait=wait_by_number,
        play=lambda number: build_episode(reward=random.Random(number).random(), seed=number),
    )
    rig = build_rig(environment=environment, max_steps=STEPS, max_lag=2, group_size=3)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"initial")
    record = LaunchRecord(RunDirectory(rig.root), term=1)
    config = rig.config.model_copy(
        update={"model": rig.config.model.model_copy(update={"name": str(model)})}
    )
    recording = EpisodeRecording(record, config.model)
    rig.recording = recording
    mark_run(RunDirectory(rig.root), "rl", run_id="run")
    note_launch(record.run_dir, 1, {"max_steps": STEPS})
    await rig.play()
    recording.finish()
    recording.close()
    return rig


async def recut(rig: Any, recorded: RecordedRun) -> list[Any]:
    with RecordedEpisodes(recorded.run_dir, [1]) as episodes:
        maker = BatchMaker(rig.config, episodes)
        return [batch async for batch in maker.make(recorded.decisions.order)]


async def test_batches_are_made_again_from_episodes_and_decisions(rig: Any) -> None:
    batches = await recut(rig, open_recorded_run(rig.root))
    assert [batch.step for batch in batches] == list(range(STEPS))
    sent = [line["samples"] for line in rig.events("batch_shipped")]
    assert [[sample.id for sample in batch.samples] for batch in batches] == sent


async def replay(rig: Any, trainer: ScriptedTrainer, **changes: Any) -> tuple[Comparison, Monitor]:
    """What a replay with this trainer finds and records."""
    recorded = open_recorded_run(rig.root)
    changed = {
        "run_dir": str(rig.root.parent / "again"),
        "recorded": str(rig.root),
        "num_steps": changes.get("num_steps", STEPS),
    }
    config = changes.get("config", rig.config).model_copy(update=changed)
    monitor = Monitor()
    training = asyncio.create_task(trainer.train() if changes.get("trains", True) else at_once(0))
    with RecordedEpisodes(recorded.run_dir, [1]) as episodes:
        maker = BatchMaker(config, episodes)
        replayer = Replayer(config, recorded, maker, trainer, monitor)
        replayer.answer_seconds = changes.get("answer_seconds", replayer.answer_seconds)
        comparison = await replayer.play()
    await training
    return comparison, monitor


async def test_the_trainer_gets_the_same_bytes_and_its_news_are_compared(rig: Any) -> None:
    trainer = ScriptedTrainer(max_steps=STEPS)
    comparison, monitor = await replay(rig, trainer)
    assert [encode(batch) for batch in trainer.batches] == [encode(b) for b in rig.trainer.batches]
    assert monitor.records == list(range(STEPS))
    assert [pair[1] for pair in comparison.loss] == [0.0, 1.0, 2.0]


async def test_a_replay_may_end_sooner(rig: Any) -> None:
    trainer = ScriptedTrainer(max_steps=1)
    await replay(rig, trainer, num_steps=1)
    assert [batch.step for batch in trainer.batches] == [0]


def with_trainer(config: RunProcessConfig, **changes: Any) -> RunProcessConfig:
    trainer = config.trainer.model_copy(update=changes)
    changed: RunProcessConfig = config.model_copy(update={"trainer": trainer})
    return changed


async def test_another_layout_repeats_the_samples(rig: Any) -> None:
    config = with_trainer(rig.config, micro_batch_tokens=16)
    trainer = ScriptedTrainer(max_steps=STEPS)
    await replay(rig, trainer, config=config)
    assert len(trainer.batches[0].ranks[0]) > len(rig.trainer.batches[0].ranks[0])


async def test_another_number_of_updates_repeats_the_samples(rig: Any) -> None:
    config = with_trainer(rig.config, updates_per_batch=2)
    trainer = ScriptedTrainer(max_steps=STEPS)
    await replay(rig, trainer, config=config)
    for again, recorded in zip(trainer.batches, rig.trainer.batches, strict=True):
        assert len(again.update_sizes) == 2
        assert sample_ids(again) == sample_ids(recorded)


def sample_ids(batch: Batch) -> list[str]:
    return sorted(id for part in batch.ranks for it in part for id in it.sample_ids)


async def test_a_silent_trainer_ends_the_replay(rig: Any) -> None:
    trainer = ScriptedTrainer(max_steps=STEPS)
    with pytest.raises(ExceptionGroup) as caught:
        await replay(rig, trainer, trains=False, answer_seconds=0.01)
    assert caught.group_contains(DeadlineError, match=r"said nothing for 0\.01 s")


def change_sources(rig: Any, **changes: Any) -> None:
    source = rig.config.sources[0].model_copy(update=changes)
    rig.config = rig.config.model_copy(update={"sources": [source]})


async def test_another_temperature_is_named_by_step_and_field(rig: Any) -> None:
    sampling = rig.config.sources[0].sampling.model_copy(update={"temperature": 0.25})
    change_sources(rig, sampling=sampling)
    with pytest.raises(ReplayError, match="batch 0: `temperatures` differs"):
        await recut(rig, open_recorded_run(rig.root))


async def test_another_algorithm_is_named_by_step_and_field(rig: Any) -> None:
    algo = rig.config.sources[0].algo.model_copy(update={"scale_by_std": True})
    change_sources(rig, algo=algo)
    with pytest.raises(ReplayError, match="batch 0: `advantages` differs"):
        await recut(rig, open_recorded_run(rig.root))


def rewrite_journal(rig: Any, event: str, **changes: Any) -> None:
    """Change the first line of a kind."""
    lines = rig.journal
    next(line for line in lines if line["event"] == event).update(changes)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (rig.root / "journal.jsonl").write_text(text)


async def test_another_verdict_of_a_filter_is_named_by_group(rig: Any) -> None:
    group = rig.events("group_graded")[0]
    rewrite_journal(rig, "group_graded", samples=[])
    with pytest.raises(ReplayError, match=f"group {group['group']}: the replay keeps 3"):
        await recut(rig, open_recorded_run(rig.root))


async def test_a_batch_of_other_samples_is_named(rig: Any) -> None:
    samples = rig.events("batch_shipped")[0]["samples"]
    rewrite_journal(rig, "batch_shipped", samples=samples[:-1])
    with pytest.raises(ReplayError, match=r"batch 0: the replay cut 6 .* the run trained 5"):
        await recut(rig, open_recorded_run(rig.root))


async def test_a_batch_without_its_groups_is_named(rig: Any) -> None:
    lines = [line for line in rig.journal if line["event"] != "group_graded"]
    (rig.root / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ReplayError, match="batch 0: only nothing wait in the replay"):
        await recut(rig, open_recorded_run(rig.root))


# ------------------------------------------------------------------ the checks before the start
async def test_a_whole_run_passes_every_check(rig: Any) -> None:
    recorded = open_recorded_run(rig.root)
    assert recorded.check_steps(None) == STEPS
    assert recorded.check_steps(2) == 2
    episodes = [e for e in rig.events("episode_ended") if e["outcome"] == "finished"]
    assert 6 <= recorded.check_episodes(1) <= recorded.check_episodes(STEPS) <= len(episodes)
    assert recorded.changed_libraries() == []
    assert [it.config for it in recorded.launches] == [{"max_steps": STEPS}]


async def test_a_journal_with_a_torn_end_is_refused_with_the_steps_that_are_whole(rig: Any) -> None:
    path = rig.root / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"line \d+ is cut off.*--max-steps 3"):
        open_recorded_run(rig.root).check_steps(None)
    assert open_recorded_run(rig.root).check_steps(STEPS) == STEPS


async def test_the_batch_that_ended_a_run_can_be_replayed(rig: Any) -> None:
    lines = rig.journal
    last = max(n for n, line in enumerate(lines) if line["event"] == "batch_shipped")
    text = "".join(json.dumps(line) + "\n" for line in lines[: last + 1])
    (rig.root / "journal.jsonl").write_text(text)
    recorded = open_recorded_run(rig.root)
    assert recorded.decisions.num_trained < STEPS
    assert recorded.check_steps(STEPS) == STEPS
    assert len(await recut(rig, recorded)) == STEPS


async def test_a_run_that_did_not_end_is_refused_unless_told_how_far(rig: Any) -> None:
    path = rig.root / "journal.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ConfigError, match=r"is the last and not `run_ended`"):
        open_recorded_run(rig.root).check_steps(None)


@pytest.mark.parametrize("num_steps", [0, STEPS + 1])
async def test_more_steps_than_recorded_are_refused(rig: Any, num_steps: int) -> None:
    with pytest.raises(ConfigError, match=f"--max-steps {num_steps}: .* recorded 3 batches"):
        open_recorded_run(rig.root).check_steps(num_steps)


async def test_missing_episodes_are_counted_and_named(rig: Any) -> None:
    path = LaunchRecord(RunDirectory(rig.root), 1).episodes
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CorruptStateError, match=r"lacks \d+ episodes.*first: g0\d+\.\d of launch"):
        open_recorded_run(rig.root).check_episodes(STEPS)


async def test_a_damaged_episode_is_named(rig: Any) -> None:
    path = LaunchRecord(RunDirectory(rig.root), 1).episodes
    content = bytearray(path.read_bytes())
    content[300] ^= 4
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match=r"episode g000000\.\d at byte \d+ is damaged"):
        open_recorded_run(rig.root).check_episodes(STEPS)


async def test_deleted_episodes_are_missed(rig: Any) -> None:
    LaunchRecord(RunDirectory(rig.root), 1).episodes.unlink()
    with pytest.raises(CorruptStateError, match=r"episodes\.bin cannot be read.*launch 1 are gone"):
        open_recorded_run(rig.root).check_episodes(STEPS)


async def test_a_run_that_outgrew_its_limit_ends_well_and_is_not_replayed(
    build_rig: Any, tmp_path: Path
) -> None:
    """I10: what a run keeps of episodes is bounded."""
    rig = build_rig(max_steps=STEPS, keep_gib=1e-9)
    run_dir = RunDirectory(rig.root)
    rig.recording = EpisodeRecording(LaunchRecord(run_dir, term=1), rig.config.model)
    mark_run(run_dir, "rl", run_id="run")
    note_launch(run_dir, 1, {"max_steps": STEPS})
    await rig.play()
    assert not list(run_dir.replay.glob("term_*/*.bin"))
    assert [path.name for path in run_dir.episodes.iterdir()] == [f"step_{STEPS - 1}"]
    assert run_dir.notices.read_text().count("cannot be replayed") == 1
    with pytest.raises(ConfigError, match=r"keep_gib, so run\S* cannot be replayed"):
        open_recorded_run(rig.root)
    assert open_recording(rig.config) is None, "a resumed run records half a replay"


async def test_a_run_without_records_is_refused(rig: Any) -> None:
    for path in sorted(RunDirectory(rig.root).replay.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(ConfigError, match=r"holds no records.*orchestrator\.recording"):
        open_recorded_run(rig.root)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no reinforcement-learning run"):
        open_recorded_run(tmp_path)


async def test_a_run_that_trained_nothing_is_refused(rig: Any) -> None:
    path = rig.root / "journal.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match="made no batch"):
        open_recorded_run(rig.root)


async def test_the_initial_weights_must_be_the_recorded_ones(rig: Any, tmp_path: Path) -> None:
    recorded = open_recorded_run(rig.root)
    name = str(tmp_path / "model")
    recorded.check_model(name)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match=r"started from: model\.safetensors changed"):
        recorded.check_model(name)
    with pytest.raises(ConfigError, match="is not here"):
        recorded.check_model(str(tmp_path / "moved"))
    LaunchRecord(recorded.run_dir, 1).model.unlink()
    with pytest.raises(CorruptStateError, match=r"model\.json is missing"):
        recorded.check_model(name)


async def test_another_version_of_a_library_is_said(rig: Any) -> None:
    path = LaunchRecord(RunDirectory(rig.root), 1).run
    values = read_json(path)
    values["libraries"]["torch"] = "1.0"
    write_json(path, values)
    (line,) = open_recorded_run(rig.root).changed_libraries()
    assert line.startswith("torch was 1.0 and is ")


def test_learning_metrics_come_from_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 0, "time": 1, "loss/total/mean": 0.5, "episode/reward/mean": 1.0},
        {"step": 0, "time": 1, "optimizer/lr": 0.1, "loss/odd/mean": None},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "lo')
    assert read_learned(path) == {0: {"loss/total/mean": 0.5, "optimizer/lr": 0.1}}
    assert read_learned(tmp_path / "absent") == {}


# ------------------------------------------------------------------ the comparison
def compared(weights: list[str | None], losses: list[float]) -> Comparison:
    comparison = Comparison(
        {1: "a", 2: "b"}, {0: {"loss/total/mean": 0.5}, 1: {"loss/total/mean": 0.25}}
    )
    for version, digest in enumerate(weights, start=1):
        comparison.published(version, digest)
    for step, loss in enumerate(losses):
        comparison.finished(step, {"loss/total/mean": loss, "time/step_seconds": 1.0})
    return comparison


def test_equal_weights_and_numbers_are_the_same() -> None:
    report = compared(["a", "b"], [0.5, 0.25]).report({"model/model.safetensors": True})
    assert (report["is_same"], report["steps"], report["versions_compared"]) == (True, 2, 2)
    assert report["loss"] == [[0.5, 0.5], [0.25, 0.25]]


@pytest.mark.parametrize(
    ("weights", "losses", "files", "found"),
    [
        (["a", "x"], [0.5, 0.25], None, ("first_different_version", 2)),
        (["a", "b"], [0.5, 0.26], None, ("first_different_step", 1)),
        (["a", "b"], [0.5, 0.25], {"model/m": False}, ("model_files", {"model/m": False})),
        ([None, None], [0.5, 0.25], None, ("versions_compared", 0)),
    ],
)
def test_any_difference_is_found(
    weights: list[str | None], losses: list[float], files: Any, found: tuple[str, Any]
) -> None:
    report = compared(weights, losses).report(files)
    assert not report["is_same"]
    assert report[found[0]] == found[1]


async def test_final_models_are_compared_file_by_file(rig: Any, tmp_path: Path) -> None:
    recorded, again = open_recorded_run(rig.root), RunDirectory(tmp_path / "again")
    assert compare_models(recorded, again, num_steps=STEPS) is None
    for folder, content in ((recorded.run_dir.model, b"same"), (again.model, b"same")):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
    assert compare_models(recorded, again, num_steps=STEPS) == {"model/model.safetensors": True}
    (again.model / "model.safetensors").write_bytes(b"other")
    assert compare_models(recorded, again, num_steps=STEPS) == {"model/model.safetensors": False}
    assert compare_models(recorded, again, num_steps=1) is None


def test_the_digest_of_an_absent_model_is_empty(tmp_path: Path) -> None:
    assert digest_model(str(tmp_path / "absent")) == {}

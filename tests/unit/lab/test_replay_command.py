"""`gradus lab replay`: what it refuses, prints and starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import pytest
from configs import build_run_config

from gradus.cli.main import main
from gradus.errors import ExitCode
from gradus.files import read_json, write_json
from gradus.launch.job import Job
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.recording import digest_model
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus.run.recording import EpisodeLog, LaunchRecord, note_launch


def write_journal(run_dir: RunDirectory) -> None:
    """One group of one episode, trained in one batch."""
    with Journal(run_dir.journal, term=1, now=lambda: 0.0) as journal:
        journal.write(JournalEvent.RUN_STARTED, version=0)
        journal.write(
            JournalEvent.GROUP_OPENED,
            group="g000000",
            source="gradus-reverse-text",
            index=0,
            key="a",
            pass_number=0,
            attempt=0,
        )
        journal.write(JournalEvent.EPISODE_STARTED, episode="g000000.0", version=0)
        journal.write(
            JournalEvent.EPISODE_ENDED, episode="g000000.0", outcome="finished", version=0
        )
        samples = ["g000000.0/0/0"]
        journal.write(JournalEvent.GROUP_GRADED, group="g000000", samples=samples, error=None)
        batch: dict[str, Any] = {"step": 0, "groups": ["g000000"]}
        journal.write(JournalEvent.BATCH_CUT, **batch)
        journal.write(JournalEvent.BATCH_SHIPPED, **batch, samples=["g000000.0/0/0"], digests={})
        journal.write(JournalEvent.POLICY_APPLIED, version=1, weights="w1")
        journal.write(JournalEvent.RUN_ENDED, step=0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that looks whole from outside."""
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    run_dir = RunDirectory(tmp_path / "demo")
    run_dir.root.mkdir()
    mark_run(run_dir, "rl", run_id="demo")
    config = build_run_config({"model": {"name": str(model)}})
    note_launch(run_dir, 1, config.without_secrets())
    record = LaunchRecord(run_dir, 1)
    write_json(record.model, digest_model(str(model)))
    log = EpisodeLog(record.episodes)
    log.append("g000000.0", b"body")
    log.close()
    write_journal(run_dir)
    return run_dir.root


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, dict[str, bool]]]:
    """The replays that were started; each comes to other weights than its run."""
    seen: list[tuple[Job, dict[str, bool]]] = []

    def launch(job: Job, *_: TextIO, **options: bool) -> int:
        seen.append((job, options))
        values: dict[str, Any] = {"is_same": False, "steps": 1, "versions_compared": 1}
        values |= {"first_different_version": 1, "first_different_step": None}
        values |= {"different_metrics": [], "model_files": None, "loss": [[0.5, 0.25]]}
        if not options["dry_run"]:
            write_json(RunDirectory(job.output_dir / job.name).replay_report, values)
        return 0

    monkeypatch.setattr("gradus_lab.replay.command.launch", launch)
    return seen


def test_a_dry_replay_says_what_would_be_replayed_and_creates_nothing(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.parent.rglob("*"))
    assert main(["lab", "replay", str(run), "--dry-run", "--trainer.optimizer.lr", "0.5"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith(f"{run}: 1 of 1 steps, 1 episodes of 1 launch")
    assert "trainer.optimizer.lr was" in shown[1]
    assert "trainer.deterministic is false" in shown[2]
    assert launches[0][1]["dry_run"]
    assert sorted(run.parent.rglob("*")) == before


def test_a_replay_that_comes_out_otherwise_is_an_error(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    target = run.parent / "again"
    code = main(["lab", "replay", str(run), "--run-dir", str(target), "--clean"])
    shown = capsys.readouterr()
    assert code == ExitCode.INTERNAL
    assert "DIFFERENT, first after step 1 (version 1)" in shown.out
    assert "other weights" in shown.err
    ((job, options),) = launches
    assert (job.output_dir / job.name, job.workload.max_steps, options) == (
        target,
        1,
        {"clean": True, "dry_run": False},
    )


def test_a_changed_trainer_may_come_out_otherwise(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "replay", str(run), "--trainer.optimizer.lr", "0.5"]) == 0
    assert "differ, as they may" in capsys.readouterr().out
    trainer = launches[0][0].plan(RunDirectory(run), 1, None).configs["run"]
    assert trainer.trainer.optimizer.lr == 0.5
    assert launches[0][0].name.startswith("demo--replay-")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume"], "resume"),
        (["--orchestrator.max-lag", "0"], "decided what the run played"),
        (["--max-steps", "2"], "recorded 1 batches"),
        (["--trainer.optimizer.lr", "0"], "trainer.optimizer.lr"),
        (["--trainer.micro-batch-tokens", "8"], "micro_batch_tokens"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is_created(
    words: list[str], said: str, run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.parent.rglob("*"))
    assert main(["lab", "replay", str(run), *words]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err
    assert (launches, sorted(run.parent.rglob("*"))) == ([], before)


def test_a_record_of_another_gradus_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = LaunchRecord(RunDirectory(run), 1).run
    write_json(path, read_json(path) | {"gradus": "0.0.1"})
    assert main(["lab", "replay", str(run)]) == ExitCode.CONFIG
    assert "was written by gradus 0.0.1" in capsys.readouterr().err


def test_a_run_that_lost_its_episodes_is_refused(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    LaunchRecord(RunDirectory(run), 1).episodes.write_bytes(b"")
    assert main(["lab", "replay", str(run)]) == ExitCode.CORRUPT_STATE
    assert "lacks 1 episodes that the journal names" in capsys.readouterr().err
    assert launches == []

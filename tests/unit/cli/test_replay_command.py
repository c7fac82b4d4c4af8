"""`gradus rl --replay` and `gradus check --replay`: what they refuse, print and start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import pytest
from configs import build_run_config

from gradus.cli.main import main
from gradus.cli.options import take_value
from gradus.errors import ConfigError, ExitCode
from gradus.files import read_json, write_json
from gradus.launch import launch as launched
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
        write_json(RunDirectory(job.output_dir / job.name).replay_report, values)
        return 0

    monkeypatch.setattr(launched, "launch", launch)
    return seen


def test_check_says_what_would_be_replayed_and_creates_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.parent.rglob("*"))
    assert main(["check", "--replay", str(run), "--trainer.optimizer.lr", "0.5"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "this run can be replayed"
    assert shown[1].endswith(f"{run}: 1 of 1 steps, 1 episodes of 1 launch")
    assert "trainer.optimizer.lr was" in shown[2]
    assert "trainer.deterministic is false" in shown[3]
    assert sorted(run.parent.rglob("*")) == before


def test_a_replay_that_comes_out_otherwise_is_an_error(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    target = run.parent / "again"
    code = main(["rl", "--replay", str(run), "--run-dir", str(target), "--clean"])
    shown = capsys.readouterr()
    assert code == ExitCode.INTERNAL
    assert "DIFFERENT, first after step 1 (version 1)" in shown.out
    assert "did not come to the same weights" in shown.err
    ((job, options),) = launches
    assert (job.output_dir / job.name, job.workload.max_steps, options) == (
        target,
        1,
        {"clean": True, "dry_run": False},
    )


def test_a_changed_trainer_may_come_out_otherwise(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--replay={run}", "--trainer.optimizer.lr", "0.5"]
    assert main(["rl", *words]) == 0
    assert "differ, as they may" in capsys.readouterr().out
    trainer = launches[0][0].plan(RunDirectory(run), 1, None).configs["run"]
    assert trainer.trainer.optimizer.lr == 0.5
    assert launches[0][0].name.startswith("demo--replay-")


def test_a_dry_replay_has_no_verdict(run: Path, launches: list[Any]) -> None:
    assert main(["rl", "--replay", str(run), "--dry-run"]) == 0
    assert launches[0][1]["dry_run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume"], "omit --resume"),
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
    assert main(["rl", "--replay", str(run), *words]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err
    assert (launches, sorted(run.parent.rglob("*"))) == ([], before)


def test_a_record_of_another_gradus_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = LaunchRecord(RunDirectory(run), 1).run
    write_json(path, read_json(path) | {"gradus": "0.0.1"})
    assert main(["rl", "--replay", str(run)]) == ExitCode.CONFIG
    assert "was written by gradus 0.0.1" in capsys.readouterr().err


def test_a_run_that_lost_its_episodes_is_refused(
    run: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    LaunchRecord(RunDirectory(run), 1).episodes.write_bytes(b"")
    assert main(["rl", "--replay", str(run)]) == ExitCode.CORRUPT_STATE
    assert "lacks 1 episodes that the journal names" in capsys.readouterr().err
    assert launches == []


def test_an_option_with_a_value_is_taken_out_of_the_words() -> None:
    words = ["--a", "1", "--run-dir", "new", "--b"]
    assert take_value(words, "--run-dir") == ("new", ["--a", "1", "--b"])
    assert take_value(["--run-dir=x"], "--run-dir") == ("x", [])
    assert take_value(["--a"], "--run-dir") == (None, ["--a"])


@pytest.mark.parametrize("words", [["--replay"], ["--replay", "--clean"], ["--replay="]])
def test_an_option_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--replay needs the folder of a run"):
        take_value(words, "--replay")


def test_an_option_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice: a, b"):
        take_value(["--replay", "a", "--replay", "b"], "--replay")


def test_help_tells_of_replays(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rl", "--help"])
    shown = capsys.readouterr().out
    assert "  --replay RUN " in shown
    assert "  --run-dir NEW " in shown
    main(["check", "--help"])
    assert "gradus check --replay RUN" in capsys.readouterr().out

"""A real disk that fills up, or cannot be written, in the middle of a run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builders import build_micro_batch, build_sample
from commands import wait_until
from configs import RUN_TOML
from evaluated import read_gradus_fields

from gradus import files
from gradus.cli import main as command_line
from gradus.cli.main import main
from gradus.errors import ExitCode, FullDiskError, StorageError
from gradus.files import append_whole
from gradus.monitor import JsonlMonitor
from gradus.orchestrator.evaluation.episodes import EpisodeKey, EvaluatedEpisode
from gradus.orchestrator.evaluation.file import EvaluationFile
from gradus.orchestrator.records.journal import Journal, JournalEvent, read_journal
from gradus.orchestrator.types import PlayedEpisode
from gradus.run.paths import RunDirectory
from gradus.testing.episodes import build_episode
from gradus.transport import SpoolReceiver, SpoolSender, spool
from gradus.wire.images import ImageStore
from gradus.wire.micro_batch import Batch
from gradus.wire.versions import VersionSpan


def fill(disk: Path, *, leave_bytes: int = 0) -> Path:
    """Take all room but about so much, to the page; returns the file to delete."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while shutil.disk_usage(disk).free:
            file.write(bytes(4096))
    os.truncate(ballast, max(0, ballast.stat().st_size - leave_bytes))
    return ballast


def test_a_record_that_does_not_fit_leaves_no_first_half(small_disk: Path) -> None:
    path = small_disk / "lines"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    append_whole(descriptor, b"one\n")
    ballast = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append_whole(descriptor, b"x" * 100_000)
    assert path.read_bytes() == b"one\n"
    ballast.unlink()
    append_whole(descriptor, b"two\n")
    os.close(descriptor)
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.shows("F24")
async def test_an_image_waits_for_room_and_is_there_whole_or_not_at_all(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "FULL_DISK_PAUSE_SECONDS", 0.01)
    store = ImageStore(small_disk / "images")
    store.put(b"first")
    ballast = fill(small_disk)
    putting = asyncio.create_task(asyncio.to_thread(store.put, b"x" * 100_000))
    await asyncio.to_thread(wait_until, lambda: "waiting for room" in caplog.text, what="a wait")
    assert [len(it.name) for it in store.folder.iterdir()] == [64]
    ballast.unlink()
    assert store.read(await putting) == b"x" * 100_000
    fill(small_disk)
    monkeypatch.setattr(files, "FULL_DISK_SECONDS", 0.0)
    with pytest.raises(FullDiskError, match="No space left on device, 200,000 bytes"):
        store.put(b"y" * 200_000)


@pytest.mark.shows("F24")
def test_metrics_keep_records_of_a_full_disk_and_go_on_when_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = JsonlMonitor(small_disk / "metrics.jsonl")
    many = {f"a/{'b' * 100}{number}/mean": 1.0 for number in range(100)}
    monitor.record(many, step=0)
    ballast = fill(small_disk)
    monitor.record(many, step=1)
    monitor.record(many, step=2)
    ballast.unlink()
    monitor.record(many, step=3)
    monitor.close()
    lines = (small_disk / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert len(caplog.records) == 1


@pytest.mark.shows("F24")
def test_a_journal_waits_for_room_whole_and_no_checkpoint_counts_on_what_waits(
    small_disk: Path,
) -> None:
    path = small_disk / "journal.jsonl"
    with Journal(path, term=1, now=time.time) as journal:
        journal.write(JournalEvent.RUN_STARTED)
        ballast = fill(small_disk)
        journal.write(JournalEvent.BATCH_SHIPPED, samples=["x" * 9000])
        with pytest.raises(FullDiskError, match=r"journal\.jsonl: No space left.*make room"):
            journal.sync()
        assert [line["event"] for line in read_journal(path)] == ["run_started"]
        ballast.unlink()
        journal.write(JournalEvent.RUN_ENDED)
        journal.sync()
        assert journal.num_lines == 3
    events = [line["event"] for line in read_journal(path)]
    assert events == ["run_started", "batch_shipped", "run_ended"]


def test_an_evaluation_goes_on_behind_an_episode_that_did_not_fit(small_disk: Path) -> None:
    path = small_disk / "eval.jsonl"

    def ended(task: int) -> EvaluatedEpisode:
        key = EpisodeKey("words" * 2000, task, 0)
        played = PlayedEpisode(str(key), "g", VersionSpan(0, 0), build_episode(reward=1.0))
        return EvaluatedEpisode(key, played, attempts=1, task_key="key")

    with EvaluationFile.create(path) as file:
        file.append(ended(0), ())
        ballast = fill(small_disk)
        with pytest.raises(OSError, match=r"No space left.*eval\.jsonl"):
            file.append(ended(1), ())
        ballast.unlink()
        file.append(ended(2), ())
    assert [fields["task"]["index"] for fields in read_gradus_fields(path)] == [0, 2]


def large_batch(step: int) -> Batch:
    sample = build_sample(length=20_000)
    return Batch(step, 1, VersionSpan(0, 0), [[build_micro_batch([sample])]])


@pytest.mark.shows("F24")
async def test_a_batch_waits_on_a_full_disk_until_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "FULL_DISK_PAUSE_SECONDS", 0.01)
    run_dir = RunDirectory(small_disk)
    sender, receiver = SpoolSender(run_dir, 1), SpoolReceiver(run_dir, 1, 0)
    ballast = fill(small_disk, leave_bytes=64 << 10)
    sending = asyncio.create_task(sender.send(large_batch(0)))
    async with asyncio.timeout(60):
        while "batch 0 waits for room" not in caplog.text:
            await asyncio.wait([sending], timeout=0.01)
    assert not sending.done()
    assert [path.name for path in run_dir.spool.iterdir()] == ["events"]
    ballast.unlink()
    await asyncio.wait_for(sending, 60)
    assert receiver.receive(0, timeout_seconds=60).step == 0
    assert receiver.receive(0, timeout_seconds=60).micro_batches


@pytest.mark.shows("F24", "I8")
async def test_a_disk_that_stays_full_ends_the_wait(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "FULL_DISK_SECONDS", 0.0)
    sender = SpoolSender(RunDirectory(small_disk), 1)
    fill(small_disk, leave_bytes=64 << 10)
    with pytest.raises(StorageError, match=r"bytes needed.*bytes free"):
        await sender.send(large_batch(0))


def test_an_error_of_the_disk_is_no_bug_of_gradus(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Command:
        @staticmethod
        def run(_: Any) -> int:
            (small_disk / "x").write_bytes(bytes(8 << 20))
            return 0

    monkeypatch.setattr(command_line.importlib, "import_module", lambda _: Command)
    monkeypatch.setattr(command_line, "run_role", lambda *_: Command.run(()))
    assert main(["trainer"]) == ExitCode.UNWRITABLE
    assert main(["check"]) == ExitCode.TRY_AGAIN
    shown = capsys.readouterr().err
    assert "No space left" in shown
    assert "report it" not in shown


LIMITED = """
import resource, sys
from gradus.cli import main
class Command:
    @staticmethod
    def run(words):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with open("x", "wb") as file:
            file.write(bytes(2000))
main.importlib.import_module = lambda _: Command
sys.exit(main.main(["check"]))
"""


@pytest.mark.shows("F79")
def test_a_limit_on_the_size_of_files_is_told_as_such(tmp_path: Path) -> None:
    words = (sys.executable, "-c", LIMITED)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.TRY_AGAIN
    assert "File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert "report it" not in done.stderr


def test_a_write_that_names_no_file_blames_the_full_disk_and_not_the_folder_of_the_process(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(small_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        (small_disk / "x").write_bytes(bytes(4096))
    assert caught.value.filename is None
    assert command_line.disk_to_blame(caught.value, ["@", str(small_disk)]) == small_disk


@pytest.mark.shows("F26")
def test_a_read_only_output_dir_is_refused_by_name_before_anything_starts(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    begun = time.process_time()
    words = ["--output-dir", str(small_disk / "runs")]
    assert main(["rl", "@", str(tmp_path / "run.toml"), *words]) == ExitCode.CONFIG
    assert time.process_time() - begun < 1
    assert f"--output-dir: '{small_disk}' cannot be written" in capsys.readouterr().err

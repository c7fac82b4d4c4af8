"""The best evaluated version is kept, whatever else is deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import CorruptStateError, FencedError
from gradus.run.lease import RunLease
from gradus.run.model_files import BestKeeper, BestVersion, read_best
from gradus.run.paths import RunDirectory


def earned(version: int, average: float, **changes: Any) -> BestVersion:
    values = {"low": None, "high": None, "episodes": {"words": 8}} | changes
    return BestVersion(version, average, **values)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def evaluate(run_dir: RunDirectory, found: BestVersion, *, term: int = 1) -> None:
    """Publish, evaluate and forget a version."""
    keeper, folder = BestKeeper.open(run_dir, term), run_dir.version(found.version)
    if found.version:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"{found.version} of {term}")
    keeper.stage(found.version)
    if found.version:
        shutil.rmtree(folder)
    keeper.settle(found, found.version)


def kept(run_dir: RunDirectory) -> str:
    best = read_best(run_dir)
    assert best is not None
    names = [path.name for path in run_dir.best.iterdir()]
    assert sorted(names) == sorted(["best.json", *([best.folder] if best.folder else [])])
    return (run_dir.best / best.folder / "model.safetensors").read_text() if best.folder else ""


def test_the_highest_average_is_kept_and_the_first_of_equal_ones(run_dir: RunDirectory) -> None:
    for version, average in ((0, 0.1), (20, 0.5), (40, 0.7), (60, 0.7), (80, 0.6)):
        evaluate(run_dir, earned(version, average))
    assert kept(run_dir) == "40 of 1"


def test_the_model_before_training_may_be_the_best_and_is_not_copied(
    run_dir: RunDirectory,
) -> None:
    evaluate(run_dir, earned(0, 0.5))
    evaluate(run_dir, earned(20, 0.5))
    assert kept(run_dir) == ""
    assert str(read_best(run_dir)) == "version 0 earned 0.5 in 8 episodes of words"


def test_other_episodes_are_not_compared(run_dir: RunDirectory) -> None:
    evaluate(run_dir, earned(20, 0.9))
    evaluate(run_dir, earned(40, 0.2, episodes={"words": 16}))
    assert kept(run_dir) == "40 of 1"


def test_a_resume_keeps_the_best_of_steps_that_are_trained_again(run_dir: RunDirectory) -> None:
    evaluate(run_dir, earned(40, 0.7))
    evaluate(run_dir, earned(40, 0.6), term=2)
    assert kept(run_dir) == "40 of 1"
    evaluate(run_dir, earned(40, 0.8), term=3)
    assert kept(run_dir) == "40 of 3"


def test_a_best_version_that_was_deleted_gives_way_to_the_next(run_dir: RunDirectory) -> None:
    evaluate(run_dir, earned(20, 0.9))
    shutil.rmtree(next(run_dir.best.glob("version_*")))
    evaluate(run_dir, earned(40, 0.3))
    assert kept(run_dir) == "40 of 1"


def test_an_evaluation_without_an_average_keeps_nothing(run_dir: RunDirectory) -> None:
    keeper = BestKeeper.open(run_dir, 1)
    run_dir.version(20).mkdir(parents=True)
    keeper.stage(20)
    keeper.settle(None, 20)
    assert list(run_dir.best.iterdir()) == []
    assert read_best(run_dir) is None


def test_a_version_that_is_not_on_disk_leaves_the_best_as_it_was(
    run_dir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate(run_dir, earned(20, 0.5))
    keeper = BestKeeper.open(run_dir, 1)
    keeper.stage(40)
    keeper.settle(earned(40, 0.9), 40)
    assert kept(run_dir) == "20 of 1"
    assert "version 40 is the best and is not on disk" in caplog.text


def test_of_weights_that_were_broadcast_only_what_they_earned_is_kept(
    run_dir: RunDirectory,
) -> None:
    evaluate(run_dir, earned(0, 0.1))
    keeper = BestKeeper.open(run_dir, 1)
    for version, average in ((20, 0.7), (40, 0.6)):
        run_dir.version(version).mkdir(parents=True)
        (run_dir.version(version) / "stream.json").write_text("{}")
        keeper.stage(version)
        keeper.settle(earned(version, average), version)
    best = read_best(run_dir)
    assert best is not None
    assert (best.version, best.folder) == (20, "")
    assert kept(run_dir) == ""


@pytest.mark.parametrize("moment", ["stage", "settle"])
def test_a_full_disk_costs_the_copy_and_neither_the_run_nor_the_best_so_far(
    run_dir: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    evaluate(run_dir, earned(20, 0.5))

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if moment == "stage":
        monkeypatch.setattr(os, "link", fails)
        monkeypatch.setattr(shutil, "copyfile", fails)
    else:
        monkeypatch.setattr("gradus.run.model_files.put_in_place", fails)
    evaluate(run_dir, earned(40, 0.9))
    assert kept(run_dir) == "20 of 1"
    assert "version 40" in caplog.text


def test_weights_on_another_disk_are_copied(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", fails)
    evaluate(run_dir, earned(20, 0.5))
    assert kept(run_dir) == "20 of 1"


def test_what_a_kill_left_staged_is_swept(run_dir: RunDirectory) -> None:
    run_dir.version(20).mkdir(parents=True)
    BestKeeper.open(run_dir, 1).stage(20)
    assert len(list(run_dir.best.iterdir())) == 1
    BestKeeper.open(run_dir, 2)
    assert list(run_dir.best.iterdir()) == []


@pytest.mark.parametrize("version", [0, 20])
def test_a_process_that_lost_the_run_keeps_nothing(run_dir: RunDirectory, version: int) -> None:
    run_dir.root.mkdir()
    lease = RunLease.take(run_dir)
    keeper = BestKeeper(lease.run_dir, lease.term - 1, BestKeeper.open(lease.run_dir, 0).files)
    lease.run_dir.version(20).mkdir(parents=True)
    keeper.stage(version)
    with pytest.raises(FencedError):
        keeper.settle(earned(version, 0.9), version)
    assert read_best(lease.run_dir) is None
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b'{"version": "x"}'])
def test_a_damaged_note_is_told_and_replaced(run_dir: RunDirectory, content: bytes) -> None:
    run_dir.best.mkdir(parents=True)
    (run_dir.best / "best.json").write_bytes(content)
    with pytest.raises(CorruptStateError, match="delete"):
        read_best(run_dir)
    evaluate(run_dir, earned(20, 0.5))
    assert kept(run_dir) == "20 of 1"

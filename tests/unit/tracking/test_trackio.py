"""Trackio, really: its store in a folder, read back with its own classes."""

from __future__ import annotations

import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from tracked import episode_row, tracked_record, tracked_run

from gradus.errors import ConfigError
from gradus.tracking.base import TrackedRun
from gradus.tracking.trackio import Trackio

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests of a process, as the package has it."""
    if "trackio" in sys.modules:
        return str(sys.modules["trackio"].utils.TRACKIO_DIR)
    return str(tmp_path_factory.mktemp("trackio"))


def opened(folder: str, run: TrackedRun) -> Trackio:
    tracker = Trackio(project="tests", folder=folder)
    tracker.open(run)
    return tracker


def logs_of(run: TrackedRun) -> list[dict[str, Any]]:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    return list(storage.get_logs("tests", run=run.name, run_id=run.id))


def test_numbers_come_back_as_they_were_and_twice_sent_is_once_there(
    folder: str, tmp_path: Path
) -> None:
    run = tracked_run(tmp_path)
    values = {f"stage/metric_{i}/mean": i / 7 for i in range(300)} | {"reward/f(x)/mean": -1e-300}
    for _ in range(2):
        tracker = opened(folder, run)
        tracker.log(tracked_record(3, values, non_finite=("loss/kl/max",)))
        tracker.log(tracked_record(3, {"eval/reward/mean": 0.5}))
        tracker.flush()
    first, second = logs_of(run)
    assert math.isnan(first.pop("loss/kl/max"))
    assert {key: first[key] for key in values} == values
    assert (first["step"], second["step"], second["eval/reward/mean"]) == (3, 3, 0.5)


def test_steps_that_are_done_again_replace_the_old_ones_of_this_run_alone(
    folder: str, tmp_path: Path
) -> None:
    run, other = tracked_run(tmp_path), tracked_run(tmp_path)
    for one in (run, other):
        tracker = opened(folder, one)
        for step in range(4):
            tracker.log(tracked_record(step, {"a/b/mean": float(step)}))
        tracker.flush()
    again = opened(folder, tracked_run(tmp_path, id=run.id, resume_step=2))
    again.log(tracked_record(2, {"a/b/mean": 20.0}))
    again.flush()
    assert [log["a/b/mean"] for log in logs_of(run)] == [0.0, 1.0, 20.0]
    assert [log["a/b/mean"] for log in logs_of(other)] == [0.0, 1.0, 2.0, 3.0]


def test_settings_and_episodes_are_there(folder: str, tmp_path: Path) -> None:
    run = tracked_run(tmp_path, config={"model": "tiny"}, tags=("one",), group="sweep")
    tracker = opened(folder, run)
    tracker.log(tracked_record(0, {"a/b/mean": 1.0}))
    tracker.log_episodes(0, [episode_row(prompt="Why? ☃", reply="Because.")])
    tracker.flush()
    tracker.close("done")
    table = logs_of(run)[1]["episodes/train"]["_value"]
    assert (table[0]["prompt"], table[0]["reply"]) == ("Why? ☃", "Because.")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    config = storage.get_run_config("tests", run_id=run.id)
    assert (config["model"], config["_Group"], config["tags"]) == ("tiny", "sweep", ["one"])


def test_a_store_that_cannot_be_written_raises_and_nothing_is_lost(
    folder: str, tmp_path: Path
) -> None:
    run = tracked_run(tmp_path)
    tracker = opened(folder, run)
    tracker.log(tracked_record(0, {"a/b/mean": 1.0}))
    database = Path(folder) / "tests.db"
    moved = database.rename(database.with_suffix(".away"))
    database.mkdir()
    with pytest.raises(sqlite3.OperationalError):
        tracker.flush()
    database.rmdir()
    moved.rename(database)
    tracker.flush()
    assert [log["a/b/mean"] for log in logs_of(run)] == [1.0]


def test_a_second_folder_in_one_process_is_refused(folder: str, tmp_path: Path) -> None:
    opened(folder, tracked_run(tmp_path))
    with pytest.raises(ConfigError, match="one folder in a process"):
        Trackio(project="tests", folder=str(tmp_path)).open(tracked_run(tmp_path))


def test_a_project_that_trackio_reserves_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trackio refuses project = 'registry-x'"):
        Trackio(project="registry-x", folder=folder).open(tracked_run(tmp_path))


def test_an_alarm_is_an_alert_there_once(folder: str, tmp_path: Path) -> None:
    run = tracked_run(tmp_path)
    tracker = opened(folder, run)
    for _ in range(2):
        tracker.alert("demo: truncated", "0.6 of the episodes", 7)
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    (alert,) = storage.get_alerts("tests", run_name=run.name, run_id=run.id)
    assert (alert["title"], alert["text"], alert["step"], alert["level"]) == (
        *("demo: truncated", "0.6 of the episodes", 7),
        "warn",
    )

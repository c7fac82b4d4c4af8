"""The tracker as a process: killed, out of reach, hanging, and beside others that are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import new_run
from commands import finish, start, wait_until
from tracked_runs import build_tracked_run, record_steps

from gradus.cli.main import main
from gradus.errors import ExitCode
from gradus.files import write_json
from gradus.run.paths import RunDirectory

TRACKER = '''
import json, os, pathlib, time


class FileTracker:
    """Appends steps to a file; `down` and `hang` beside it say how it fails."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.pending = []

    def _obey(self):
        while (self.folder / "hang").exists():
            time.sleep(0.01)
        if (self.folder / "down").exists():
            raise ConnectionError("no route to host")

    def open(self, run):
        self._obey()

    def log(self, record):
        self.pending.append(record.step)

    def log_episodes(self, step, rows):
        pass

    def flush(self):
        self._obey()
        with (self.folder / "steps").open("a") as file:
            file.write("".join(f"{step}\\n" for step in self.pending))
        self.pending.clear()

    def close(self, outcome):
        (self.folder / "outcome").write_text(outcome)
'''

pytestmark = pytest.mark.slow


class Place:
    """The folder of one tracker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @property
    def steps(self) -> list[int]:
        path = self.folder / "steps"
        return [int(step) for step in path.read_text().split()] if path.is_file() else []

    def monitor(self, **shared: Any) -> dict[str, Any]:
        options = {"folder": str(self.folder)}
        return {
            **{"type": "file_tracker:FileTracker", "name": self.folder.name, "options": options},
            **shared,
        }


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    """A run with three records, and a tracker of one's own on the path."""
    (tmp_path / "file_tracker.py").write_text(TRACKER)
    return build_tracked_run(tmp_path / "run", num_records=3)


def start_tracker(run_dir: RunDirectory, *monitors: Mapping[str, Any]) -> subprocess.Popen[str]:
    """`gradus tracker`, as the launcher starts it."""
    config = run_dir.config / "tracker.json"
    write_json(config, {"run_dir": str(run_dir.root), "term": 0, "monitor": list(monitors)})
    return start("tracker", "@", str(config), variables=_path(run_dir))


def _path(run_dir: RunDirectory) -> dict[str, str]:
    return {"PYTHONPATH": str(run_dir.root.parent)}


def end(process: subprocess.Popen[str]) -> str:
    """What the launcher does when everything else has ended."""
    process.send_signal(signal.SIGTERM)
    return finish(process)


def test_after_kill_9_the_next_process_loses_nothing_and_repeats_nothing(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    place = Place(tmp_path / "here")
    process = start_tracker(run_dir, place.monitor())
    wait_until(lambda: (run_dir.trackers / "here.json").is_file(), timeout_seconds=60)
    os.kill(process.pid, signal.SIGKILL)
    finish(process, exit_code=-signal.SIGKILL)
    record_steps(run_dir, range(3, 6))
    write_json(run_dir.summary, {"outcome": "done"})
    process = start_tracker(run_dir, place.monitor())
    wait_until(lambda: len(place.steps) >= 6, timeout_seconds=60)
    end(process)
    assert place.steps == [0, 1, 2, 3, 4, 5]
    assert (place.folder / "outcome").read_text() == "done"


@pytest.mark.shows("F75")
def test_one_that_hangs_and_one_that_is_down_hold_up_neither_the_third_nor_the_end(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    well, down, hung = (Place(tmp_path / name) for name in ("well", "down", "hung"))
    (down.folder / "down").touch()
    (hung.folder / "hang").touch()
    places = (down, hung, well)
    process = start_tracker(run_dir, *(place.monitor(flush_seconds=0.5) for place in places))
    wait_until(lambda: well.steps, timeout_seconds=60)
    end(process)
    assert (well.steps, down.steps, hung.steps) == ([0, 1, 2], [], [])
    said = run_dir.notices.read_text()
    told = f"send them with: gradus view {run_dir.root} --to"
    assert f"down: 3 records are not sent (ConnectionError: no route to host); {told} down" in said
    assert f"hung: 3 records are not sent (not done within 0.5 s); {told} hung" in said
    assert "well:" not in said


def test_a_damaged_note_of_one_tracker_costs_the_others_nothing(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    odd, well = (Place(tmp_path / name) for name in ("odd", "well"))
    run_dir.trackers.mkdir()
    (run_dir.trackers / "odd.json").write_text("{")
    write_json(run_dir.summary, {"outcome": "done"})
    process = start_tracker(run_dir, odd.monitor(), well.monitor())
    wait_until(lambda: well.steps, timeout_seconds=60)
    end(process)
    assert (odd.steps, well.steps) == ([], [0, 1, 2])
    assert (well.folder / "outcome").read_text() == "done"
    assert "odd: some records are not sent" in run_dir.notices.read_text()


def test_an_end_that_is_not_confirmed_is_not_called_0_records(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    place = Place(tmp_path / "here")
    process = start_tracker(run_dir, place.monitor(flush_seconds=0.5))
    wait_until(lambda: (run_dir.trackers / "here.json").is_file(), timeout_seconds=60)
    (place.folder / "outcome").mkdir()  # So `close` raises.
    end(process)
    said = run_dir.notices.read_text()
    assert "here: got everything and has not confirmed the end (" in said
    assert f"make sure with: gradus view {run_dir.root} --to here" in said


def test_track_sends_what_the_run_could_not(run_dir: RunDirectory, tmp_path: Path) -> None:
    place = Place(tmp_path / "here")
    note = {"config": {"monitor": [place.monitor()]}, "code_version": "1", "packages": {}}
    write_json(run_dir.launched, note)
    track = ("view", str(run_dir.root), "--to", "here")
    printed = finish(start(*track, variables=_path(run_dir)))
    assert "here has all of" in printed
    assert "3 records were sent now" in printed
    assert place.steps == [0, 1, 2]


def test_track_beside_the_tracker_of_the_run_is_refused_and_harms_nothing(
    run_dir: RunDirectory, tmp_path: Path
) -> None:
    place = Place(tmp_path / "here")
    process = start_tracker(run_dir, place.monitor())
    wait_until(lambda: place.steps, timeout_seconds=60)
    write_json(run_dir.launched, {"config": {"monitor": [place.monitor()]}})
    track = ("view", str(run_dir.root), "--to", "here")
    assert "already" in finish(start(*track, variables=_path(run_dir)), exit_code=64)
    end(process)
    cursor = json.loads((run_dir.trackers / "here.json").read_text())
    assert cursor["offset"] == run_dir.metrics.stat().st_size
    assert place.steps == [0, 1, 2]


def test_prometheus_is_not_sent_what_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = new_run(tmp_path)
    assert main(["view", str(run_dir.root), "--to", "prometheus"]) == ExitCode.CONFIG
    assert "has ended, and Prometheus asks" in capsys.readouterr().err

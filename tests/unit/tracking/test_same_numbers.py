"""One run, all trackers, really: the same numbers under the same names everywhere."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import pytest
from read_back import Points, mlflow_points, trackio_points, wandb_points
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked_runs import build_tracked_run

from gradus.config.schema.monitor import (
    MlflowConfig,
    MonitorConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)
from gradus.monitor import JsonlMonitor
from gradus.run.growing_files import truncate_to_step
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records
from gradus.tracking.follow.cursor import run_identity
from gradus.tracking.follow.process import send_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Of MLflow's libraries.
]
NAMES = ("episode/reward/mean", "time/step_seconds", "episode/a b/reward/f(x)/mean", "loss/é:<b>")


def record_numbers(run_dir: RunDirectory, steps: range, factor: float) -> None:
    times = iter(range(10**6))
    monitor = JsonlMonitor(run_dir.metrics, clock=lambda: 1.8e9 * factor + next(times))
    for step in steps:
        numbers = {name: factor * (step + 1) / (at + 3) for at, name in enumerate(NAMES)}
        monitor.record(numbers | {"loss/kl/max": math.inf}, step=step)
        monitor.record({"eval/words/avg": factor / 7, "eval/version": step}, step=step)
    monitor.close()


def recorded(run_dir: RunDirectory) -> dict[tuple[str, int], float]:
    """What the file says: metric and step → value."""
    return {
        (name, record.step): value
        for record in read_records(run_dir.metrics)
        for name, value in record.numbers.items()
    }


def last(points: Points) -> dict[tuple[str, int], float]:
    """The last value of each metric at each step."""
    return {(name, step): v[-1] for name, steps in points.items() for step, v in steps.items()}


def tensorboard_points(folder: Path) -> Points:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: [event.value] for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def shown(run_dir: RunDirectory, trackio_folder: str) -> dict[str, dict[tuple[str, int], float]]:
    """Send everything to every tracker, and read it back."""
    monitors: list[MonitorConfig] = [
        TensorBoardConfig(),
        WandbConfig(mode="offline"),
        MlflowConfig(tracking_uri=f"sqlite:///{run_dir.trackers / 'mlflow.db'}"),
        TrackioConfig(folder=trackio_folder),
    ]
    for monitor in monitors:
        send_run(run_dir, monitor, say=print)
    run_id, name = run_identity(run_dir), run_dir.root.name
    stores = {
        "tensorboard": tensorboard_points(run_dir.trackers / "tensorboard"),
        "wandb": wandb_points(run_dir.trackers / "wandb"),
        "mlflow": mlflow_points(f"sqlite:///{run_dir.trackers / 'mlflow.db'}", run_id),
        "trackio": trackio_points("gradus", name, run_id),
    }
    return {tracker: last(points) for tracker, points in stores.items()}


def same(value: float, other: float, *, is_single: bool) -> bool:
    """Equal to the last bit; TensorBoard's scalars are float32."""
    if is_single:
        other = struct.unpack("f", struct.pack("f", other))[0]
    return value == other or (math.isnan(value) and math.isnan(other))


def test_all_trackers_show_the_numbers_of_the_file_also_after_a_resume(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Trackio has one folder in a process.
    known = sys.modules.get("trackio")
    folder = str(known.utils.TRACKIO_DIR if known else tmp_path_factory.mktemp("trackio"))
    run_dir = build_tracked_run(tmp_path / "run")
    record_numbers(run_dir, range(4), factor=1.0)
    shown(run_dir, folder)
    truncate_to_step(run_dir, 2)
    record_numbers(run_dir, range(2, 5), factor=1.1)
    expected = recorded(run_dir)
    for tracker, numbers in shown(run_dir, folder).items():
        assert numbers.keys() == expected.keys(), tracker
        wrong = {
            key: (value, expected[key])
            for key, value in numbers.items()
            if not same(value, expected[key], is_single=tracker == "tensorboard")
        }
        assert wrong == {}, tracker

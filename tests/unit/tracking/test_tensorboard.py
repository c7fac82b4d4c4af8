"""Event files as TensorBoard's own reader sees them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import wait_until
from forgetful_disk import ForgetfulDisk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
from tracked import episode_row, tracked_run
from tracked_runs import build_tracked_run, record_episodes, record_steps

from gradus.config.schema.monitor import TensorBoardConfig
from gradus.monitor import JsonlMonitor
from gradus.run.growing_files import truncate_to_step
from gradus.run.paths import RunDirectory
from gradus.run.records import Record, read_records
from gradus.tracking.describe import describe_run
from gradus.tracking.follow.cursor import Cursor
from gradus.tracking.follow.feed import Feed, build_tracker
from gradus.tracking.tensorboard import TensorBoard

CONFIG = TensorBoardConfig()


def feed(run_dir: RunDirectory, config: TensorBoardConfig = CONFIG) -> Path:
    """Send everything; the folder of the event files."""
    fed = Feed(run_dir, config, say=print)
    fed.finish()
    wait_until(lambda: fed.is_done)
    fed.close()
    return run_dir.trackers / config.title


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(folder: Path, tag: str = "loss/total/mean") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def test_two_trackers_with_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=3)
    for name in (None, "second"):
        feed(run_dir, TensorBoardConfig(folder=str(tmp_path / "all"), name=name))
    folders = sorted((tmp_path / "all").iterdir())
    assert [len(points(folder)) for folder in folders] == [3, 3]


def test_the_event_files_hold_the_numbers_of_the_records(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run")
    monitor = JsonlMonitor(run_dir.metrics, clock=lambda: 1_800_000_000.5)
    generator = np.random.default_rng(0)
    for step in range(20):
        names = ("episode/reward/mean", "loss/x y/ü|<b>", "time/step_seconds")
        numbers = {name: float(generator.normal() * 1e3) for name in names}
        monitor.record(numbers | {"loss/bad": float("nan")}, step=step)
    monitor.close()
    accumulator = read(feed(run_dir))
    for record in read_records(run_dir.metrics):
        for name, number in record.numbers.items():
            (event,) = [e for e in accumulator.Scalars(name) if e.step == record.step]
            assert np.array_equal(np.float32(event.value), np.float32(number), equal_nan=True)
            assert event.wall_time == record.time


def test_what_a_kill_left_unconfirmed_does_not_stand_there_twice(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=3)
    folder = feed(run_dir)
    killed = build_tracker(CONFIG)
    cursor = json.loads((run_dir.trackers / "tensorboard.json").read_text())
    killed.open(describe_run(run_dir, CONFIG, Cursor(mark=cursor["mark"])))
    killed.log(Record(3, 0.0, {"loss/total/mean": 99.0}))
    killed.close("unknown")  # On the disk, but nobody noted it.
    record_steps(run_dir, [3])
    feed(run_dir)
    assert points(folder) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def opened(run_dir: RunDirectory, mark: str | None = None) -> TensorBoard:
    tracker = TensorBoard()
    tracker.open(describe_run(run_dir, CONFIG, Cursor(mark=mark)))
    return tracker


def test_points_behind_the_last_flush_go_and_those_before_it_stay(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    killed = opened(run_dir)
    killed.log(Record(0, 0.0, {"loss/total/mean": 0.0}))
    mark = killed.flush()
    killed.log(Record(1, 0.0, {"loss/total/mean": 99.0}))
    killed.close("unknown")
    second = opened(run_dir, mark)
    second.log(Record(1, 0.0, {"loss/total/mean": 1.0}))
    second.close("done")
    assert points(run_dir.trackers / "tensorboard") == [(0, 0.0), (1, 1.0)]


def test_what_a_flush_confirmed_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    folder = run_dir.trackers / "tensorboard"
    folder.mkdir(parents=True)
    disk = ForgetfulDisk.under(folder, monkeypatch)
    tracker = opened(run_dir)
    tracker.log(Record(0, 0.0, {"loss/total/mean": 0.5}))
    tracker.flush()
    disk.lose_power()
    tracker.close("unknown")
    assert points(folder) == [(0, 0.5)]


def test_steps_of_a_resumed_run_replace_the_old_ones(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=4)
    feed(run_dir)
    truncate_to_step(run_dir, 2)
    record_steps(run_dir, [2, 3, 4], value=0.5)
    assert points(feed(run_dir)) == [(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]


def test_two_trackers_of_one_type_are_two_places(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    second = TensorBoardConfig(name="second")
    assert feed(run_dir) != feed(run_dir, second)
    assert points(run_dir.trackers / "second") == points(run_dir.trackers / "tensorboard")


def test_runs_of_one_name_do_not_mix_in_a_shared_folder(tmp_path: Path) -> None:
    config = TensorBoardConfig(folder=str(tmp_path / "shared"))
    for parent in ("a", "b"):
        feed(build_tracked_run(tmp_path / parent / "run", num_records=1), config)
    folders = list((tmp_path / "shared").iterdir())
    assert [points(folder) for folder in folders] == [[(0, 0.0)]] * 2


@pytest.mark.shows("I9", "SEC12")
def test_config_and_episodes_can_be_read_and_hold_no_secret(tmp_path: Path) -> None:
    config = {"seed": 3, "inference": {"env_vars": {"HF_TOKEN": "hf_secret"}}, "lr": 1e-5}
    run_dir = build_tracked_run(tmp_path / "run", num_records=1, config=config)
    record_episodes(run_dir, 0, [0.0, 1.0])
    folder = feed(run_dir)
    accumulator = read(folder)
    (text,) = accumulator.Tensors("run/config")
    assert '"seed": 3' in text.tensor_proto.string_val[0].decode()
    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = parse_session_start_info_plugin_data(content)
    assert (start.hparams["seed"].number_value, start.hparams["lr"].number_value) == (3, 1e-5)
    (table,) = accumulator.Tensors("episodes/train")
    cells = [cell.decode() for cell in table.tensor_proto.string_val]
    assert [d.size for d in table.tensor_proto.tensor_shape.dim] == [3, 6]
    assert cells[6:12] == ["0", "-0.5", "    question 0", "    answer 0", "words", "task 0"]
    assert not [f for f in folder.iterdir() if b"hf_secret" in f.read_bytes()]


def test_a_digest_for_a_key_leaves_the_place_to_the_texts(tmp_path: Path) -> None:
    tracker = TensorBoard()
    tracker.open(tracked_run(tmp_path))
    tracker.log_episodes(0, [episode_row(task="5cf78f2dd6afc630" * 4), episode_row(task="a" * 31)])
    tracker.close("done")
    (table,) = read(tmp_path / "trackers" / "tracker").Tensors("episodes/train")
    cells = [cell.decode() for cell in table.tensor_proto.string_val]
    assert cells[5::6] == ["task", "5cf78f2dd6af…", "a" * 31]


def test_a_shorter_mark_than_the_file_keeps_the_mark(tmp_path: Path) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    (file,) = feed(run_dir).iterdir()
    with file.open("ab") as torn:
        torn.write(b"half an event")
    record_steps(run_dir, [2])
    assert points(feed(run_dir)) == [(0, 0.0), (1, 1.0), (2, 2.0)]

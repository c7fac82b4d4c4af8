"""Weights & Biases, really: offline, with its files read back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from read_back import wandb_lines, wandb_records
from tracked import episode_row, tracked_record, tracked_run
from wandb_server import wandb_server

from gradus.errors import ConfigError
from gradus.tracking.base import TrackedRun
from gradus.tracking.wandb import Wandb

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, and no key."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "run" / "wandb" / "cache"))
    yield home
    assert list(home.rglob("*")) == []


def opened(run: TrackedRun, **options: Any) -> Wandb:
    tracker = Wandb(**{"project": "tests", "entity": None, "mode": "offline", **options})
    tracker.open(run)
    return tracker


def test_numbers_come_back_as_they_were_and_nothing_is_left_running(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {f"stage/metric_{i}/mean": i / 7 for i in range(900)} | {"reward/f(x)/mean": -1e-300}
    run = tracked_run(folder, config={"lr": 0.5}, tags=("one",), group="sweep")
    tracker = opened(run)
    record = tracked_record(3, values, non_finite=("loss/kl/max",))
    tracker.log(record)
    tracker.log(tracked_record(3, {"eval/reward/mean": 0.5}))
    tracker.log_episodes(3, [episode_row(prompt="Why? ☃", reply="Because.")])
    tracker.alert("demo: truncated", "alarm truncated at step 4", 3)
    tracker.flush()
    first, second, third = wandb_lines(run.own_folder)
    (written,) = run.own_folder.glob("wandb/offline-run-*/*.wandb")
    assert b"alarm truncated at step 4" in written.read_bytes()
    tracker.close("done")
    assert math.isnan(first.pop("loss/kl/max"))
    assert first == {**values, "step": 3, "_step": 0, "_timestamp": record.time}
    assert (second["eval/reward/mean"], second["step"], second["_step"]) == (0.5, 3, 1)
    assert (third["episodes/train/_type"], third["episodes/train/nrows"], third["step"]) == (
        "table-file",
        1,
        3,
    )
    (table,) = run.own_folder.glob("wandb/offline-run-*/files/media/table/**/*.json")
    content = json.loads(table.read_text())
    assert content["data"][0][content["columns"].index("prompt")] == "Why? ☃"
    (made,) = [record.run for record in wandb_records(run.own_folder) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in made.config.update}
    assert (config["lr"], config["packages"]) == (0.5, {"torch": "2.13.0"})
    assert (made.run_group, list(made.tags), made.display_name) == ("sweep", ["one"], "demo")


def test_a_second_process_goes_on_in_the_same_run_and_sends_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = tracked_run(folder)
    tracker = opened(run)
    tracker.log(tracked_record(0, {"a/b/mean": 0.0}))
    mark = tracker.flush()
    tracker.log(tracked_record(1, {"a/b/mean": 1.0}))
    again = opened(tracked_run(folder, id=run.id, mark=mark))
    for step in (1, 2):
        again.log(tracked_record(step, {"a/b/mean": float(step)}))
    again.flush()
    again.close("done")
    seen = {line["_step"]: line["a/b/mean"] for line in wandb_lines(run.own_folder)}
    assert seen == {0: 0.0, 1: 1.0, 2: 2.0}


def test_steps_that_are_done_again_are_added_on_the_axis_of_our_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = tracked_run(folder)
    tracker = opened(run)
    for step in range(3):
        tracker.log(tracked_record(step, {"a/b/mean": float(step)}))
    mark = tracker.flush()
    tracker.close("failed")
    again = opened(tracked_run(folder, id=run.id, mark=mark, resume_step=1))
    again.log(tracked_record(1, {"a/b/mean": 10.0}))
    again.flush()
    again.close("done")
    lines = [
        (line["_step"], line["step"], line["a/b/mean"]) for line in wandb_lines(run.own_folder)
    ]
    assert lines == [(0, 0, 0.0), (1, 1, 1.0), (2, 2, 2.0), (3, 1, 10.0)]
    axes = {
        m.glob_name: m.step_metric
        for r in wandb_records(run.own_folder)
        if (m := r.metric).glob_name
    }
    assert axes == {"*": "step"}


def test_what_weights_and_biases_has_is_not_sent_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run = tracked_run(folder)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with wandb_server([{"_step": number, "kept": True} for number in range(2)]) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        tracker = opened(replace(run, mark="1"), mode="online")
        for step in (1, 2, 3, 4):
            tracker.log(tracked_record(step, {"a/b/mean": step / 7}))
        tracker.flush()
        tracker.close("failed")
        lines = [json.loads(line) for line in server.lines]
    assert [line.get("kept") for line in lines] == [True, True, None, None, None]
    sent = [(line["_step"], line["step"], line["a/b/mean"]) for line in lines[2:]]
    assert sent == [(number, number, number / 7) for number in (2, 3, 4)]
    assert server.exit_codes == [1]


def test_without_a_key_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wandb login`, set WANDB_API_KEY, or give the tracker"):
        opened(tracked_run(tmp_path / "run"), mode="online")

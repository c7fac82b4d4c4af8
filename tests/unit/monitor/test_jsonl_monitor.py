"""Records as JSON lines."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.monitor import JsonlMonitor, MonitorGroup


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_has_step_time_and_its_metrics(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl", clock=lambda: 12.5)
    monitor.record({"episode/reward/mean": 0.25}, step=3)
    monitor.record({"loss/total/mean": 1}, step=4)
    monitor.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 3, "time": 12.5, "episode/reward/mean": 0.25},
        {"step": 4, "time": 12.5, "loss/total/mean": 1.0},
    ]


def test_a_record_can_be_read_at_once(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    monitor.record({}, step=0)
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [0]
    monitor.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_and_listed(tmp_path: Path, value: float) -> None:
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    monitor.record({"loss/total/mean": value, "loss/entropy/mean": 1.0}, step=0)
    monitor.close()
    (record,) = read(tmp_path / "metrics.jsonl")
    assert record["loss/total/mean"] is None
    assert record["non_finite"] == ["loss/total/mean"]


@pytest.mark.parametrize("key", ["step", "time", "non_finite"])
def test_a_metric_with_the_name_of_a_field_is_refused(tmp_path: Path, key: str) -> None:
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=f"metric '{key}' has the name of a field"):
        monitor.record({key: 1.0}, step=0)
    monitor.close()


def test_a_torn_last_line_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "ti')
    monitor = JsonlMonitor(path)
    monitor.record({}, step=2)
    monitor.close()
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["step"] == 0
    assert json.loads(lines[2])["step"] == 2


def test_records_are_appended_to_what_is_there(tmp_path: Path) -> None:
    for step in range(2):
        monitor = JsonlMonitor(tmp_path / "new" / "metrics.jsonl")
        monitor.record({}, step=step)
        monitor.close()
    assert [record["step"] for record in read(tmp_path / "new" / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("name", ["ENOSPC", "EIO", "ESTALE", "EROFS"])
def test_an_error_of_the_disk_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(getattr(errno, name), name)

    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    group = MonitorGroup([monitor])
    with monkeypatch.context() as patch:
        patch.setattr("gradus.files.append_whole", fail)
        group.record({}, step=0)
    assert group.muted == []
    group.record({}, step=1)
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [0, 1]
    group.close()


@pytest.mark.shows("SEC14")
def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        JsonlMonitor(tmp_path / "metrics.jsonl")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(metrics=st.dictionaries(st.text(min_size=5).map("m/".__add__), st.floats()))
def test_every_line_is_strict_json(tmp_path: Path, metrics: dict[str, float]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    monitor = JsonlMonitor(path)
    monitor.record(metrics, step=0)
    monitor.close()
    (line,) = path.read_bytes().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {key: record[key] for key, value in metrics.items() if math.isfinite(value)} == {
        key: value for key, value in metrics.items() if math.isfinite(value)
    }

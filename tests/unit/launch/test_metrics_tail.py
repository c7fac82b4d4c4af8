"""Records of a file that another process writes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus.launch.records import LineTail, MetricsTail, Record
from gradus.monitor import JsonlMonitor


def test_a_file_that_is_not_there_yet_has_no_records(tmp_path: Path) -> None:
    assert MetricsTail(tmp_path / "metrics.jsonl").read() == []


def test_records_of_the_monitor_are_read_once_and_in_order(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    monitor.record({"episode/reward/mean": 0.5}, step=0)
    assert tail.read() == [Record(0, {"episode/reward/mean": 0.5})]
    monitor.record({"loss/total/mean": float("nan"), "optimizer/lr": 1.0}, step=1)
    monitor.record({}, step=2)
    assert tail.read() == [Record(1, {"optimizer/lr": 1.0}), Record(2, {})]
    assert tail.read() == []
    monitor.close()


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_text('{"step": 0}\n{"step": 1, "a/b')
    assert [record.step for record in tail.read()] == [0]
    path.write_text('{"step": 0}\n{"step": 1, "a/b/mean": 2}\n')
    assert tail.read() == [Record(1, {"a/b/mean": 2.0})]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(lines=st.lists(st.binary(max_size=40)))
def test_lines_that_are_no_records_are_skipped(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([*lines, b'{"step": 7}', b""]))
    assert Record(7, {}) in MetricsTail(path).read()


def test_lines_of_an_earlier_launch_are_not_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "notices.log"
    path.write_text("old\n")
    tail = LineTail(path, skips_old=True)
    with path.open("a") as file:
        file.write("new\nhalf")
    assert tail.read() == [b"new"]

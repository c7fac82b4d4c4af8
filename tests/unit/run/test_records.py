"""The records of a run: whole, while the file grows, after a cut, and in files that are damaged."""

from __future__ import annotations

import json
import math
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradus.monitor import JsonlMonitor
from gradus.run import growing_files, json_lines, records
from gradus.run.growing_files import truncate_to_sizes, truncate_to_step
from gradus.run.json_lines import BrokenLines, LineTail, last_lines, sampled_lines
from gradus.run.paths import RunDirectory
from gradus.run.records import (
    Place,
    Record,
    RecordTail,
    is_sampled,
    read_block,
    read_records,
    sample_records,
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def line(step: int, **numbers: float | None) -> str:
    return json.dumps({"step": step, "time": 5.0, **numbers}) + "\n"


def write(run_dir: RunDirectory, *steps: int) -> None:
    with run_dir.metrics.open("a") as file:
        file.writelines(line(step) for step in steps)


def tail_of(run_dir: RunDirectory) -> RecordTail:
    return RecordTail(run_dir, Place())


def steps_of(tail: RecordTail) -> list[int]:
    return [record.step for record in tail.read()]


def test_a_file_that_is_not_there_yet_has_no_records(run_dir: RunDirectory) -> None:
    assert steps_of(tail_of(run_dir)) == []
    assert list(read_records(run_dir.metrics)) == []
    assert list(sample_records(run_dir.metrics)) == []


def test_records_of_the_monitor_are_followed_once_and_in_order(run_dir: RunDirectory) -> None:
    tail = tail_of(run_dir)
    monitor = JsonlMonitor(run_dir.metrics, clock=lambda: 5.0)
    monitor.record({"episode/reward/mean": 0.5}, step=0)
    assert list(tail.read()) == [Record(0, 5.0, {"episode/reward/mean": 0.5})]
    monitor.record({"loss/total/mean": float("nan"), "optimizer/lr": 1.0}, step=1)
    monitor.record({}, step=2)
    lost = Record(1, 5.0, {"optimizer/lr": 1.0}, ("loss/total/mean",))
    assert list(tail.read()) == [lost, Record(2, 5.0, {})]
    assert list(tail.read()) == []
    monitor.close()


def test_half_a_line_waits_for_its_end(run_dir: RunDirectory) -> None:
    tail = tail_of(run_dir)
    run_dir.metrics.write_text(line(0) + '{"step": 1, "time": 5, "a/b')
    assert steps_of(tail) == [0]
    with run_dir.metrics.open("a") as file:
        file.write('/mean": 2}\n')
    assert list(tail.read()) == [Record(1, 5.0, {"a/b/mean": 2.0})]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(lines=st.lists(st.binary(max_size=40)))
def test_lines_that_are_no_records_are_skipped(tmp_path: Path, lines: list[bytes]) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.metrics.write_bytes(b"\n".join([*lines, line(7).encode()]))
    assert Record(7, 5.0, {}) in list(tail_of(run_dir).read())


def test_lines_that_are_no_records_are_counted_and_the_first_is_named(
    run_dir: RunDirectory,
) -> None:
    wrong = b'[1]\n\n\xff\xfe\n{"step": 1}\n{"step": true, "time": 1}\n{"step": -1, "time": 1}\n'
    wrong += b'{"time": 1, "step": 1' + b"0" * 400 + b"}\n"
    run_dir.metrics.write_bytes(line(0).encode() + wrong + line(2).encode() + b'{"st')
    read, sampled = BrokenLines(), BrokenLines()
    assert [it.step for it in read_records(run_dir.metrics, broken=read)] == [0, 2]
    assert [it.step for it in sample_records(run_dir.metrics, broken=sampled)] == [0, 2]
    assert (
        read
        == sampled
        == read_block(run_dir, Place()).broken
        == BrokenLines(6, first_byte=len(line(0)))
    )
    assert str(read) == f"6 lines that cannot be read, the first at byte {len(line(0))}"


@pytest.mark.parametrize(
    ("written", "expected"),
    [("null", None), ("NaN", None), ("-Infinity", None), ("1" * 400, None), ("2", 2.0)],
)
def test_a_number_that_is_not_finite_is_listed_and_costs_no_other(
    run_dir: RunDirectory, written: str, expected: float | None
) -> None:
    run_dir.metrics.write_text(f'{{"step": 0, "time": 1, "a": {written}, "b": 1, "c": true}}\n')
    (record,) = read_records(run_dir.metrics)
    assert record.metrics.get("a") == expected
    assert record.non_finite == (() if expected else ("a",))
    assert (record.metrics["b"], "c" in record.metrics) == (1.0, False)
    assert math.isnan(record.numbers["a"]) == (expected is None)


def test_a_metric_is_a_number_or_not_finite_and_never_both(run_dir: RunDirectory) -> None:
    run_dir.metrics.write_text('{"step": 0, "time": 1, "a": 1, "non_finite": ["a", "b", "b"]}\n')
    assert list(read_records(run_dir.metrics)) == [Record(0, 1.0, {"a": 1.0}, ("b",))]


def test_a_name_with_half_a_character_can_be_sent_anywhere(run_dir: RunDirectory) -> None:
    run_dir.metrics.write_text('{"step": 0, "time": 1, "a/\\ud800": 1}\n')
    (record,) = read_records(run_dir.metrics)
    assert list(record.metrics) == ["a/?"]


def test_a_follower_learns_what_a_resume_made_void_and_reads_on_behind_the_cut(
    run_dir: RunDirectory,
) -> None:
    write(run_dir, 0, 1, 2, 3)
    tail = tail_of(run_dir)
    assert steps_of(tail) == [0, 1, 2, 3]
    truncate_to_step(run_dir, 2)
    write(run_dir, 2, 3, 4)
    assert read_block(run_dir, tail.place).was_cut
    assert steps_of(tail) == [2, 3, 4]
    assert tail.place.resume_step == 2


@pytest.mark.parametrize("kept", [None, 2, 0, -1])
def test_a_follower_that_looks_in_the_middle_of_a_cut_waits_for_its_note(
    kept: int | None, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read anew, every step would reach a tracker twice. The records are cut back to `kept` lines,
    deleted at -1, or cut by their step."""
    write(run_dir, 0, 1, 2, 3)
    tail = tail_of(run_dir)
    assert steps_of(tail) == [0, 1, 2, 3]
    before, looked = tail.place, []

    def look(*_: object) -> None:
        looked.append((steps_of(tail), tail.place == before))

    monkeypatch.setattr(growing_files, "_cut_tokens", look)
    if kept is None:
        truncate_to_step(run_dir, 2)
    else:
        size = len(line(0)) * kept
        truncate_to_sizes(run_dir, 2, {} if kept < 0 else {run_dir.metrics.name: size})
    assert looked == [([], True)]
    write(run_dir, 2)
    assert steps_of(tail) == [2]


def test_of_two_resumes_the_earlier_step_makes_more_void(run_dir: RunDirectory) -> None:
    write(run_dir, 0, 1, 2, 3, 4)
    tail = tail_of(run_dir)
    assert steps_of(tail) == [0, 1, 2, 3, 4]
    for step in (3, 1):
        truncate_to_step(run_dir, step)
    write(run_dir, 1)
    assert (steps_of(tail), tail.place.resume_step) == ([1], 1)


def test_a_later_resume_to_a_later_step_leaves_void_what_was(run_dir: RunDirectory) -> None:
    write(run_dir, 0, 1, 2)
    tail = tail_of(run_dir)
    assert steps_of(tail) == [0, 1, 2]
    truncate_to_step(run_dir, 1)
    write(run_dir, 1, 2, 3)
    assert (steps_of(tail), tail.place.resume_step) == ([1, 2, 3], 1)
    truncate_to_step(run_dir, 3)
    write(run_dir, 3)
    assert (steps_of(tail), tail.place.resume_step) == ([3], 1)


def test_a_cut_behind_the_place_of_a_follower_makes_nothing_void(run_dir: RunDirectory) -> None:
    write(run_dir, 0, 1, 2)
    block = read_block(run_dir, Place(), num_bytes=1)
    truncate_to_step(run_dir, 1)
    write(run_dir, 1)
    tail = RecordTail(run_dir, block.after)
    assert ([it.step for it in block.records], steps_of(tail)) == ([0], [1])
    assert tail.place.resume_step is None


def test_a_file_that_shrank_without_a_note_is_read_again(run_dir: RunDirectory) -> None:
    write(run_dir, 0, 1)
    tail = tail_of(run_dir)
    assert steps_of(tail) == [0, 1]
    run_dir.metrics.write_text(line(0))
    assert steps_of(tail) == [0]
    assert tail.place.resume_step == 0


def test_a_torn_line_goes_with_the_records_that_are_cut(run_dir: RunDirectory) -> None:
    run_dir.metrics.write_text(line(0) + line(1).strip())
    truncate_to_step(run_dir, 1)
    assert run_dir.metrics.read_text() == line(0)


@pytest.mark.shows("I10")
def test_a_huge_file_is_read_in_little_memory(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 1 << 16)
    with run_dir.metrics.open("wb") as file:
        for step in range(3):
            file.write(b'{"x": "' + b"y" * (8 << 20) + b'"}\n' + line(step).encode())
    broken = BrokenLines()
    tracemalloc.start()
    found = [record.step for record in read_records(run_dir.metrics, broken=broken)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found, steps_of(tail_of(run_dir))) == ([0, 1, 2], [0, 1, 2])
    assert (broken.count, peak < 6 << 20) == (3, True)


def test_of_a_long_file_an_even_sample_and_the_end_are_read(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_NUM_SAMPLES", 10)
    monkeypatch.setattr(records, "_SAMPLED_TAIL_BYTES", 100)
    write(run_dir, *range(1000))
    assert len(list(sample_records(run_dir.metrics))) == 1000
    assert not is_sampled(run_dir.metrics)
    monkeypatch.setattr(records, "_SAMPLED_FROM_BYTES", 1_000)
    found = [record.step for record in sample_records(run_dir.metrics)]
    assert is_sampled(run_dir.metrics)
    assert found == sorted(set(found))
    assert (found[0], found[-3:]) == (0, [997, 998, 999])
    assert 10 < len(found) < 20


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    num_places=st.integers(1, 20),
    tail_bytes=st.integers(0, 300),
)
@example(sizes=[0, 0, 0, 35, 52, 60, 25, 60, 60], num_places=4, tail_bytes=149)
def test_a_sample_has_each_line_at_most_once_and_every_line_of_the_end(
    tmp_path: Path, sizes: list[int], num_places: int, tail_bytes: int
) -> None:
    path = tmp_path / "lines"
    content = b"".join(b"x" * size + b"\n" for size in sizes)
    path.write_bytes(content)
    found = list(sampled_lines(path, max_bytes=300, num_places=num_places, tail_bytes=tail_bytes))
    assert all(content[it.start : it.end] == it.content for it in found)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(it.start == 0 or content[it.start - 1 : it.start] == b"\n" for it in found)
    assert {it.start for it in last_lines(path, max_bytes=tail_bytes)} <= {it.start for it in found}


def test_the_last_lines_of_a_file_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "notices.log"
    path.write_text("one\ntwo\nthree\nfour")
    assert [it.content for it in last_lines(path, max_bytes=14)] == [b"three\n"]
    assert [it.start for it in last_lines(path, max_bytes=99)] == [0, 4, 8]


def test_lines_of_an_earlier_launch_are_not_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "notices.log"
    path.write_text("old\n")
    tail = LineTail(path, skips_old=True)
    with path.open("a") as file:
        file.write("new\nhalf")
    assert tail.read() == ["new"]

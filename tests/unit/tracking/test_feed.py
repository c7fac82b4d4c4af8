"""Everything arrives once and in order, whatever fails between."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until
from tracked_runs import (
    ScriptedTracker,
    TrackedPlace,
    build_tracked_run,
    record_episodes,
    record_steps,
    scripted_monitor,
)

from gradus.errors import RunDirectoryError
from gradus.monitor import JsonlMonitor
from gradus.run.growing_files import truncate_to_step
from gradus.run.paths import RunDirectory
from gradus.tracking.follow.feed import Feed, _cause
from gradus.tracking.follow.process import send_run


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between two tries and two looks are short."""
    monkeypatch.setattr("gradus.tracking.follow.feed.FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr("gradus.tracking.follow.feed.MOST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr("gradus.tracking.follow.feed.POLL_SECONDS", 0.01)


@pytest.fixture
def place() -> Iterator[TrackedPlace]:
    """What arrives at the tracker "here"."""
    ScriptedTracker.places["here"] = TrackedPlace()
    yield ScriptedTracker.places["here"]
    ScriptedTracker.places.pop("here").released.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "tracker-here"])


class Fed:
    """A feed of the tracker "here", driven by a test."""

    def __init__(self, run_dir: RunDirectory, **shared: Any) -> None:
        self.said: list[str] = []
        config = scripted_monitor("here", **shared)
        self.feed = Feed(run_dir, config, say=self.said.append)

    def finish(self) -> None:
        """Send everything and close."""
        self.feed.finish()
        wait_until(lambda: self.feed.is_done)
        self.feed.close()


def test_every_record_arrives_once_and_in_order(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=3)
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0, 1, 2])
    record_steps(run_dir, range(3, 5))
    fed.finish()
    assert (place.steps, place.outcomes, fed.feed.unsent()) == ([0, 1, 2, 3, 4], ["unknown"], 0)


def test_where_to_look_is_said_once_when_something_is_there_and_without_a_password(
    tmp_path: Path, place: TrackedPlace
) -> None:
    place.shown_by = "http://me:hunter22@numbers.example/run"
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0, 1])
    place.is_down = True
    record_steps(run_dir, range(2, 3))
    wait_until(lambda: fed.feed.failed_in_a_row >= 1)
    place.is_down = False
    fed.finish()
    looks = [line for line in fed.said if "numbers.example" in line]
    assert looks == [fed.said[0]]
    assert looks[0].startswith("here: http")
    assert "hunter22" not in looks[0]


def test_a_new_process_goes_on_where_the_killed_one_was(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=3)
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0, 1, 2])
    fed.feed.close()  # As a kill does: nothing is flushed and nothing is said.
    record_steps(run_dir, range(3, 5))
    Fed(run_dir).finish()
    assert place.steps == [0, 1, 2, 3, 4]
    assert [run.mark for run in place.runs] == [None, "3 safe"]
    assert len({run.id for run in place.runs}) == 1


@pytest.mark.shows("F75")
def test_an_outage_loses_nothing_and_is_said_once(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0, 1])
    place.is_down = True
    record_steps(run_dir, range(2, 4))
    wait_until(lambda: fed.feed.failed_in_a_row >= 3)
    fed.feed.failed_in_a_row = 5000  # after days
    wait_until(lambda: fed.feed.failed_in_a_row > 5002)
    record_steps(run_dir, range(4, 6))
    place.is_down = False
    fed.finish()
    assert place.steps == [0, 1, 2, 3, 4, 5]
    assert fed.said == [
        "here: ConnectionError: the server is gone; tries again, nothing is lost",
        "here: sends again, and what it missed",
    ]


@pytest.mark.shows("F75")
def test_a_tracker_that_cannot_be_opened_at_first_is_tried_again(
    tmp_path: Path, place: TrackedPlace
) -> None:
    place.open_failures = 2
    fed = Fed(build_tracked_run(tmp_path / "run", num_records=2))
    fed.finish()
    assert (place.steps, place.open_failures) == ([0, 1], 0)


@pytest.mark.shows("F75")
def test_a_tracker_that_hangs_is_said_and_gets_the_rest_when_it_comes_back(
    tmp_path: Path, place: TrackedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.tracking.follow.feed.CALL_SECONDS", 0.05)
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    place.hangs.set()
    fed = Fed(run_dir)
    wait_until(fed.feed.is_hung)
    assert fed.feed.is_hung()
    place.hangs.clear()
    place.released.set()
    fed.finish()
    assert place.steps == [0, 1]
    assert [line.partition(";")[0] for line in fed.said] == [
        "here: it did not answer within 0.05 s",
        "here: sends again, and what it missed",
    ]


def test_steps_that_a_resume_does_again_replace_those_at_the_tracker(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=5)
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0, 1, 2, 3, 4])
    truncate_to_step(run_dir, 3)
    record_steps(run_dir, range(3, 6), value=0.5)
    fed.finish()
    losses = [record.metrics["loss/total/mean"] for record in place.safe]
    assert losses == [0, 1, 2, 3.5, 4.5, 5.5]
    assert [run.resume_step for run in place.runs] == [None, 3]


def test_a_resume_between_two_processes_is_noticed_though_the_file_grew_past_the_old_end(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=3)
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0, 1, 2])
    fed.feed.close()
    truncate_to_step(run_dir, 1)
    record_steps(run_dir, range(1, 9), value=0.5)
    Fed(run_dir).finish()
    losses = [record.metrics["loss/total/mean"] for record in place.safe]
    assert losses == [0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5]


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 1, "time": 5.0, "loss/tot')
    fed = Fed(run_dir)
    wait_until(lambda: place.steps == [0])
    with run_dir.metrics.open("a") as file:
        file.write('al/mean": 1.0}\n')
    fed.finish()
    assert place.steps == [0, 1]


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    os.truncate(run_dir.metrics, run_dir.metrics.stat().st_size - 9)
    record_steps(run_dir, [2])
    Fed(run_dir).finish()
    assert place.steps == [0, 2]


def test_two_processes_do_not_feed_one_tracker(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    fed = Fed(run_dir)
    with pytest.raises(RunDirectoryError, match="to 'here' already"):
        Fed(run_dir)
    fed.finish()
    Fed(run_dir).finish()
    assert place.steps == [0]


def test_episodes_of_every_nth_step_come_as_a_table(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=5)
    for step in range(5):
        record_episodes(run_dir, step, [1.0, 0.0, None])
    Fed(run_dir, episodes_interval_steps=2).finish()
    assert sorted(place.episodes) == [0, 2, 4]
    rows = place.episodes[2]
    assert [(row.reward, row.advantage) for row in rows] == [(None, None), (0.0, -0.5), (1.0, 0.5)]
    assert (rows[2].prompt, rows[2].reply, rows[2].task) == ("question 0", "answer 0", "task 0")
    assert rows[0].reply == "TaskError: no answer"


def test_without_tables_no_text_leaves_the_folder(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    record_episodes(run_dir, 0, [1.0])
    Fed(run_dir, episodes_interval_steps=None).finish()
    assert (place.steps, place.episodes) == ([0], {})


def test_a_record_that_a_tracker_refuses_is_left_out_and_said(
    tmp_path: Path, place: TrackedPlace
) -> None:
    place.refused = {2}
    fed = Fed(build_tracked_run(tmp_path / "run", num_records=5))
    fed.finish()
    assert (place.steps, fed.feed.unsent()) == ([0, 1, 3, 4], 0)
    why = "ValueError: step 2 has a number that nobody can show"
    assert fed.said == [
        f"here: {why}; tries again, nothing is lost",
        "here: sends again, and what it missed",
        f"here: does not take the numbers of step 2, which are left out: {why}",
        f"here: {why}; tries again, nothing is lost",
        "here: sends again, and what it missed",
    ]


def test_a_refused_table_costs_no_number(tmp_path: Path, place: TrackedPlace) -> None:
    place.refuses_tables = True
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    record_episodes(run_dir, 0, [1.0])
    fed = Fed(run_dir)
    fed.finish()
    assert (place.steps, place.episodes) == ([0, 1], {})
    assert any("does not take the episodes of step 0" in line for line in fed.said)


def test_a_tracker_that_refuses_everything_gets_nothing_more_and_nothing_counts_as_sent(
    tmp_path: Path, place: TrackedPlace
) -> None:
    place.refused = set(range(9))
    fed = Fed(build_tracked_run(tmp_path / "run", num_records=9))
    wait_until(lambda: fed.feed.is_done)
    assert (place.steps, fed.feed.unsent(), fed.feed.cause is None) == ([], 9, False)
    assert sum("left out" in line for line in fed.said) == 3
    fed.feed.close()


def test_an_outage_never_leaves_a_record_out(tmp_path: Path, place: TrackedPlace) -> None:
    place.is_down = True
    fed = Fed(build_tracked_run(tmp_path / "run", num_records=2))
    wait_until(lambda: fed.feed.failed_in_a_row >= 5)
    place.is_down = False
    fed.finish()
    assert place.steps == [0, 1]


def test_a_missing_module_ends_the_tracker_in_a_sentence(
    tmp_path: Path, place: TrackedPlace
) -> None:
    place.failure = ModuleNotFoundError("No module named 'odd'", name="odd")
    fed = Fed(build_tracked_run(tmp_path / "run", num_records=2))
    wait_until(lambda: fed.feed.is_done)
    assert fed.said == ["here: it needs the module 'odd', which is not installed; sends nothing"]
    fed.feed.close()


def test_no_password_of_a_server_is_said(tmp_path: Path, place: TrackedPlace) -> None:
    place.failure = ConnectionError("no answer of http://me:hidden@host/api")
    fed = Fed(build_tracked_run(tmp_path / "run", num_records=2))
    wait_until(lambda: fed.said)
    assert fed.said[0].startswith("here: ConnectionError: no answer of http://host/api;")
    fed.feed.close()


def test_no_option_that_a_class_refuses_is_said_where_it_is_secret(tmp_path: Path) -> None:
    config = scripted_monitor("elsewhere", options={"api_key": "hidden"})
    said: list[str] = []
    feed = Feed(build_tracked_run(tmp_path / "run"), config, say=said.append)
    wait_until(lambda: feed.is_done)
    feed.close()
    assert "hidden" not in said[0]
    assert "'api_key': (removed)" in said[0]


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"time": 1, "step": 1' + b"0" * 400 + b"}", b"\xff"]
)
def test_a_hostile_line_costs_itself_alone(
    tmp_path: Path, place: TrackedPlace, line: bytes
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    with run_dir.metrics.open("ab") as file:
        file.write(line + b"\n")
    record_steps(run_dir, range(1, 2))
    Fed(run_dir).finish()
    assert place.steps == [0, 1]


def test_half_a_character_in_a_name_is_replaced(tmp_path: Path, place: TrackedPlace) -> None:
    run_dir = build_tracked_run(tmp_path / "run")
    run_dir.metrics.write_text('{"step": 0, "time": 1, "a\\ud800": 1}\n')
    Fed(run_dir).finish()
    assert place.safe[0].metrics == {"a?": 1.0}


def test_episodes_that_cannot_be_read_cost_the_table_alone(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    record_episodes(run_dir, 0, [1.0])
    file = run_dir.episodes / "step_0" / "train.jsonl"
    file.write_bytes(b"[" * 100_000 + b"\n" + file.read_bytes())
    Fed(run_dir).finish()
    assert (place.steps, len(place.episodes[0])) == ([0, 1], 1)


def test_a_reward_that_is_no_number_leaves_its_place_empty(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    record_episodes(run_dir, 0, [float("nan"), 1.0])
    Fed(run_dir).finish()
    assert [row.reward for row in place.episodes[0]] == [None, 1.0]
    assert [row.advantage for row in place.episodes[0]] == [None, 0.5]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"offset": "far"}', b'{"num_cuts": null}'])
def test_a_damaged_cursor_is_said_and_nothing_is_sent(
    tmp_path: Path, place: TrackedPlace, content: bytes
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=1)
    run_dir.trackers.mkdir()
    (run_dir.trackers / "here.json").write_bytes(content)
    fed = Fed(run_dir)
    wait_until(lambda: fed.feed.is_done)
    fed.feed.close()
    assert "does not say what was sent" in fed.said[0]
    assert place.steps == []


@pytest.mark.shows("SEC12")
def test_a_secret_at_the_place_of_a_cut_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    for before in range(240, 320):
        said = _cause(ValueError("x" * before + " 0123456789abcdef0123456789abcdef01234567 y"))
        assert "0123" not in said


def test_a_tracker_gets_what_the_processes_took_with_each_record(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)
    times = [json.loads(line)["time"] for line in run_dir.metrics.read_text().splitlines()]
    look = {"format": 1, "time": times[0], "term": 1, "numbers": {"machine/trainer/cpu": 0.5}}
    run_dir.machine.write_text(json.dumps(look) + "\n")
    fed = Fed(run_dir)
    fed.finish()
    assert [it.metrics["machine/trainer/cpu"] for it in place.safe] == [0.5, 0.5]


def record_alarm(run_dir: RunDirectory, states: dict[int, float]) -> None:
    monitor = JsonlMonitor(run_dir.metrics)
    for step, state in states.items():
        numbers = {"alarm/words/truncated": state, "alarm/words/truncated/value": 0.1 + state}
        monitor.record(numbers, step=step)
    monitor.close()


def test_an_alarm_is_told_where_it_begins_and_ends_and_again_when_it_was_not_taken(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run")
    line = "alarm truncated of source 'words' at step 2: 1.1, threshold 0.5 (share of ...)"
    run_dir.notices.write_text(f"probe\n{line}\n")
    record_alarm(run_dir, {0: 0.0, 1: 1.0, 2: 1.0, 3: 0.0})
    place.refuses_alerts = 1
    fed = Fed(run_dir)
    fed.finish()
    title = "run: words/truncated"
    over = "alarm truncated of source 'words' at step 4 is over: 0.1"
    assert place.alerts == [(title, line, 1), (title, over, 3)]
    assert place.steps == [0, 1, 2, 3]


def test_an_alarm_that_is_on_does_not_ring_again_in_the_next_process(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run")
    told = []
    for states in ({0: 0.0, 1: 1.0}, {2: 1.0}, {3: 0.0}):
        record_alarm(run_dir, states)
        Fed(run_dir).finish()
        told.append([step for _, _, step in place.alerts])
    assert told == [[1], [1], [1, 3]]


def test_records_of_a_run_that_goes_on_are_counted_as_sent(
    tmp_path: Path, place: TrackedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = build_tracked_run(tmp_path / "run", num_records=2)

    def is_in_use(_: RunDirectory) -> bool:
        """The run ends after two more steps."""
        if len(place.steps) == 2:
            record_steps(run_dir, range(2, 4))
        return len(place.steps) < 4

    monkeypatch.setattr("gradus.tracking.follow.process.is_in_use", is_in_use)
    assert send_run(run_dir, scripted_monitor("here")) == len(place.steps) >= 4


def test_a_tracker_gets_the_metrics_that_it_was_given_and_no_others(
    tmp_path: Path, place: TrackedPlace
) -> None:
    run_dir = build_tracked_run(tmp_path / "run")
    monitor = JsonlMonitor(run_dir.metrics)
    values = {"loss/a/mean": 1.0, "loss/b/max": 2.0, "time/x": 3.0, "loss/c/mean": math.nan}
    monitor.record(values, step=0)
    monitor.close()
    Fed(run_dir, include=["loss/*"], exclude=["*/max"]).finish()
    (record,) = place.safe
    assert (record.metrics, record.non_finite) == ({"loss/a/mean": 1.0}, ("loss/c/mean",))

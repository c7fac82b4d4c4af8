"""The page of a run: what it shows of records, evaluations, queues and processes, and when."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tracked import tracked_run

from gradus.errors import ProcessError
from gradus.monitor import JsonlMonitor
from gradus.monitor.live import write_live
from gradus.run.paths import RunDirectory
from gradus.run.records import Record
from gradus.tracking.base import RunOutcome, TrackedRun
from gradus.tracking.prometheus.board import (
    LIVE_UNTIL_SECONDS,
    MAX_LABEL_CHARACTERS,
    NumberBoard,
)
from gradus.tracking.prometheus.tracker import MetricsServer, Prometheus


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return tracked_run(tmp_path, id="ab12", name='my "run"', tracker="prometheus")


@pytest.fixture
def tracker(run: TrackedRun) -> Iterator[Prometheus]:
    made = Prometheus(last_scrape_seconds=0.01)
    made.open(run)
    yield made
    made.close("done")


def targets(run: TrackedRun) -> Path:
    return run.folder / "ready" / "prometheus.json"


def parse(text: str) -> dict[str, float]:
    """Name and labels without `run` → value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "run"}
            words = ",".join(f"{k}={v}" for k, v in labels.items())
            found[f"{sample.name}{{{words}}}" if words else sample.name] = sample.value
    return found


def collected(board: NumberBoard) -> dict[str, float]:
    return parse(generate_latest(board).decode())


def scrape(run: TrackedRun) -> dict[str, float]:
    """As Prometheus does it: the address comes from the file."""
    (target,) = json.loads(targets(run).read_text())
    url = f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return parse(answer.read().decode())


def record(step: int, **metrics: float) -> Record:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Record(step=step, time=1000.0 + step, metrics=named)


def test_a_run_that_has_recorded_nothing_has_a_page(run: TrackedRun, tracker: Prometheus) -> None:
    shown = scrape(run)
    assert shown["gradus_run_info{id=ab12,kind=rl,version=0.1.0}"] == 1
    assert "gradus_step" not in shown


def test_the_last_step_takes_the_place_of_the_one_before(
    run: TrackedRun, tracker: Prometheus
) -> None:
    tracker.log(record(0, episode__reward__mean=0.25, group__abandoned__sum=3.0))
    tracker.log(record(1, episode__reward__mean=0.5))
    shown = scrape(run)
    assert shown["gradus_step"] == 1
    assert shown["gradus_record_timestamp_seconds"] == 1001
    assert shown["gradus_episode_reward_mean"] == 0.5
    assert "gradus_group_abandoned" not in shown


def test_an_evaluation_stays_until_the_next_one(run: TrackedRun, tracker: Prometheus) -> None:
    tracker.log(Record(2, 1.0, {"eval/avg@4": 0.75, "eval/error/Timeout/sum": 1.0}))
    tracker.log(record(3, episode__reward__mean=0.5))
    assert scrape(run)["gradus_eval_avg_at_k{k=4}"] == 0.75
    tracker.log(Record(4, 2.0, {"eval/avg@4": 1.0}))
    shown = scrape(run)
    assert shown["gradus_eval_avg_at_k{k=4}"] == 1.0
    assert "gradus_eval_error_error{error=Timeout}" not in shown
    assert shown["gradus_episode_reward_mean"] == 0.5


def test_records_that_are_sent_again_do_not_take_the_page_back(
    run: TrackedRun, tracker: Prometheus
) -> None:
    for step in (0, 1, 2, 0, 1):
        tracker.log(record(step, episode__reward__mean=float(step)))
    assert scrape(run)["gradus_episode_reward_mean"] == scrape(run)["gradus_step"] == 2


def test_a_number_that_was_not_finite_is_nan(run: TrackedRun, tracker: Prometheus) -> None:
    tracker.log(Record(0, 1.0, {}, non_finite=("loss/total/mean",)))
    assert math.isnan(scrape(run)["gradus_loss_total_mean"])


def test_a_page_opened_late_shows_what_the_file_holds(run: TrackedRun) -> None:
    """After a resume, or a kill of the tracker: the follower does not send old records again."""
    metrics = RunDirectory(run.folder).metrics
    monitor = JsonlMonitor(metrics, clock=lambda: 1000.0)
    monitor.record({"episode/words/reward/mean": 0.25, "loss/total/mean": math.nan}, step=6)
    monitor.record({"eval/version": 7.0}, step=7)
    monitor.close()
    with metrics.open("a") as file:
        file.write('{"step": 8, "time": 1001.0, "episode/rew')
    tracker = Prometheus()
    tracker.open(run)
    shown = scrape(run)
    tracker.close("done")
    assert shown["gradus_step"] == 6
    assert shown["gradus_episode_source_reward_mean{source=words}"] == 0.25
    assert shown["gradus_eval_version"] == 7
    assert math.isnan(shown["gradus_loss_total_mean"])


def test_the_queues_are_those_of_the_scrape(run: TrackedRun, tracker: Prometheus) -> None:
    live = RunDirectory(run.folder).live
    for free in (3.0, 2.0):
        numbers = {"live/slots/free": free, "live/episodes/words/finished/total": 8.0}
        write_live(live, numbers, term=1)
        shown = scrape(run)
        assert shown["gradus_live_slots_free"] == free
        name = "gradus_live_episodes_source_outcome_total{outcome=finished,source=words}"
        assert shown[name] == 8


def test_queues_of_a_process_that_is_gone_are_not_shown_and_its_counters_are(
    run: TrackedRun,
) -> None:
    directory = RunDirectory(run.folder)
    numbers = {"live/slots/free": 3.0, "live/engine/generated_tokens/total": 8.0}
    write_live(directory.live, numbers, term=1)
    written = directory.live.stat().st_mtime
    late = NumberBoard(run, directory, clock=lambda: written + LIVE_UNTIL_SECONDS + 1)
    shown = collected(late)
    assert "gradus_live_slots_free" not in shown
    assert shown["gradus_live_engine_generated_tokens_total"] == 8
    assert shown["gradus_live_timestamp_seconds"] == pytest.approx(written, abs=1)


def test_a_damaged_live_file_costs_only_its_numbers(run: TrackedRun, tracker: Prometheus) -> None:
    tracker.log(record(0, episode__reward__mean=0.25))
    RunDirectory(run.folder).live.write_bytes(b'{"time": 1, "nu')
    assert scrape(run)["gradus_episode_reward_mean"] == 0.25


def test_processes_show_their_last_sign_of_life(run: TrackedRun, tracker: Prometheus) -> None:
    alive = RunDirectory(run.folder).alive
    alive.mkdir()
    (alive / "env_words.json").write_text("{}")
    assert "gradus_process_alive_timestamp_seconds{process=env_words}" in scrape(run)


def test_the_end_of_a_run_is_shown_and_then_the_page_is_gone(run: TrackedRun) -> None:
    board = NumberBoard(run, RunDirectory(run.folder))
    assert collected(board)["gradus_run_ended{outcome=failed}"] == 0
    board.end("failed")
    assert collected(board)["gradus_run_ended{outcome=failed}"] == 1
    tracker = Prometheus()
    tracker.open(run)
    tracker.close("failed")
    tracker.close("failed")
    assert not targets(run).exists()


@pytest.mark.parametrize(("outcome", "waited"), [("solved", [5.0]), ("unknown", [])])
def test_the_end_of_a_run_waits_for_a_last_look_and_a_lost_connection_does_not(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, outcome: RunOutcome, waited: list[float]
) -> None:
    found: list[float] = []

    def wait_for_scrape(_: MetricsServer, *, at_most_seconds: float) -> None:
        found.append(at_most_seconds)

    monkeypatch.setattr(MetricsServer, "wait_for_scrape", wait_for_scrape)
    tracker = Prometheus(last_scrape_seconds=5.0)
    tracker.open(run)
    tracker.close(outcome)
    assert found == waited


def test_a_taken_port_is_said_and_leaves_no_address(run: TrackedRun, tracker: Prometheus) -> None:
    port = int(json.loads(targets(run).read_text())[0]["targets"][0].rsplit(":", 1)[1])
    other = replace(run, folder=run.folder / "other")
    second = Prometheus(port=port)
    with pytest.raises(ProcessError, match="is taken"):
        second.open(other)
    assert not targets(other).exists()
    second.close("done")


def test_two_pages_of_one_run_have_two_addresses(run: TrackedRun, tracker: Prometheus) -> None:
    second = Prometheus()
    second.open(replace(run, tracker="other"))
    other = run.folder / "ready" / "prometheus.other.json"
    assert json.loads(other.read_text()) != json.loads(targets(run).read_text())
    second.close("done")
    assert targets(run).exists()
    assert not other.exists()


def test_the_console_says_where_the_page_is(run: TrackedRun, tracker: Prometheus) -> None:
    assert "/metrics" in RunDirectory(run.folder).notices.read_text()


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", "a\\nb", "{x=1}", "ünï 🙂", "a,b"])
def test_a_label_says_what_it_said(run: TrackedRun, value: str) -> None:
    board = NumberBoard(replace(run, name=value), RunDirectory(run.folder))
    board.add(Record(0, 1.0, {f"mine/{value}": 2.0}))
    page = generate_latest(board).decode()
    (family,) = [f for f in text_string_to_metric_families(page) if f.name == "gradus_metric"]
    (sample,) = family.samples
    assert (sample.labels, sample.value) == ({"run": value, "name": f"mine/{value}"}, 2.0)


def test_a_lone_surrogate_and_a_huge_label_are_cut_to_what_can_be_sent(run: TrackedRun) -> None:
    board = NumberBoard(replace(run, name="\ud800" + "x" * 10_000), RunDirectory(run.folder))
    (family, *_) = text_string_to_metric_families(generate_latest(board).decode())
    assert family.samples[0].labels["run"] == "?" + "x" * (MAX_LABEL_CHARACTERS - 1)


def test_two_numbers_with_the_same_labels_are_one(run: TrackedRun) -> None:
    board = NumberBoard(run, RunDirectory(run.folder))
    long = "mine/" + "x" * MAX_LABEL_CHARACTERS
    board.add(Record(0, 1.0, {f"{long}a": 1.0, f"{long}b": 2.0}))
    page = generate_latest(board).decode()
    assert [line[-3:] for line in page.splitlines() if "xxx" in line] == ["2.0"]

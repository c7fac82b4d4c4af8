"""MLflow, really: its store in SQLite, read back with its own client."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracked import episode_row, tracked_record, tracked_run

from gradus.errors import ConfigError
from gradus.tracking.base import TrackedRun
from gradus.tracking.mlflow import Mlflow, metric_name, name_of_metric

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Of MLflow's libraries.
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database: to make its tables takes MLflow seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def shown_run(store: str, run: TrackedRun) -> Any:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("tests")
    wanted = f"tags.`gradus.run_id` = '{run.id}'"
    (found,) = client.search_runs([experiment.experiment_id], wanted)
    return client, found


def opened(store: str, run: TrackedRun) -> Mlflow:
    tracker = Mlflow(experiment="tests", tracking_uri=store)
    tracker.open(run)
    return tracker


@pytest.fixture(scope="module")
def validation() -> Any:
    return pytest.importorskip("mlflow.utils.validation")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_name_is_taken_and_can_be_read_back(validation: Any, name: str) -> None:
    validation._validate_metric_name(metric_name(name))
    if len(metric_name(name)) < 250:
        assert name_of_metric(metric_name(name)) == name


def test_usual_names_stay_and_long_ones_are_told_apart() -> None:
    usual = ["episode/reward/mean", "time/step_seconds", "agent/judge:a b/turns-1.max"]
    assert [metric_name(name) for name in usual] == usual
    long = metric_name("a" * 300), metric_name("a" * 301)
    assert long[0] != long[1]
    assert max(map(len, long)) <= 250


def test_numbers_come_back_as_they_were_and_twice_sent_is_once_there(
    store: str, tmp_path: Path
) -> None:
    run = tracked_run(tmp_path)
    values = {f"stage/metric_{i}/mean": i / 7 for i in range(1100)} | {"reward/f(x)/mean": -1e-300}
    record = tracked_record(3, values, non_finite=("loss/kl/max",))
    for _ in range(2):
        tracker = opened(store, run)
        tracker.log(record)
        tracker.flush()
    client, shown = shown_run(store, run)
    read = {name_of_metric(name): value for name, value in shown.data.metrics.items()}
    assert math.isnan(read.pop("loss/kl/max"))
    assert read == values
    (point,) = client.get_metric_history(shown.info.run_id, "stage/metric_1/mean")
    assert (point.step, point.timestamp, point.value) == (3, round(record.time * 1000), 1 / 7)


def test_settings_episodes_and_the_end_are_there(store: str, tmp_path: Path) -> None:
    config = {"model": "tiny", "source": [{"name": "a"}, {"name": "b"}], "long": "x" * 9000}
    run = tracked_run(tmp_path, config=config, tags=("one", "two"), group="sweep")
    tracker = opened(store, run)
    tracker.log(tracked_record(0, {"a/b/mean": 1.0}))
    tracker.log_episodes(0, [episode_row(prompt="Why? ☃", reply="Because.")])
    tracker.flush()
    tracker.close("failed")
    _, shown = shown_run(store, run)
    assert shown.data.params == {"model": "tiny", "source.a.name": "a", "source.b.name": "b"}
    assert (shown.data.tags["gradus.tags"], shown.data.tags["gradus.group"]) == (
        "one, two",
        "sweep",
    )
    assert shown.info.status == "FAILED"
    artifacts = Path(shown.info.artifact_uri.removeprefix("file://"))
    assert json.loads((artifacts / "config.json").read_text()) == config
    table = json.loads((artifacts / "episodes" / "train" / "step_0.json").read_text())
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (row["prompt"], row["reply"]) == ("Why? ☃", "Because.")


def test_a_resume_with_other_settings_goes_on_in_the_same_run(store: str, tmp_path: Path) -> None:
    before = tracked_run(tmp_path, config={"lr": 1.0})
    opened(store, before).close("failed")
    opened(store, tracked_run(tmp_path, id=before.id, config={"lr": 2.0, "seed": 1}))
    _, shown = shown_run(store, before)
    assert shown.data.params == {"lr": "1.0", "seed": "1"}
    assert shown.info.status == "RUNNING"


def test_a_server_that_is_away_raises_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow = pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        uri = f"http://127.0.0.1:{listening.getsockname()[1]}"
    tracker = Mlflow(experiment="tests", tracking_uri=uri)
    with pytest.raises(mlflow.MlflowException, match="Connection refused"):
        tracker.open(tracked_run(tmp_path))


def test_a_deleted_experiment_is_said(tmp_path: Path, store: str) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=store)
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(ConfigError, match="'gone' of MLflow is deleted"):
        Mlflow(experiment="gone", tracking_uri=store).open(tracked_run(tmp_path))

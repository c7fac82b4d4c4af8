"""MLflow: numbers, settings and sample episodes at a server or in a SQLite file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.run.paths import GOOD_OUTCOMES
from gradus.run.records import Record
from gradus.run.settings import leaves
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun, library

RUN_ID_TAG = "gradus.run_id"
"""Tag by which a run is found again."""
_METRICS_PER_CALL = 1000
_SETTINGS_PER_CALL = 100
_LONGEST_NAME = 250
_LONGEST_SETTING = 500
"""What every server since 2.0 takes; longer values stand in `config.json` only."""
_REFUSED = re.compile(r"[^/\w.\- :]|_(?=x)")
_NO_PARTS = {"": "_x_", ".": "_x2e_", "..": "_x2e__x2e_"}
_ENDINGS = dict.fromkeys(GOOD_OUTCOMES, "FINISHED") | {
    "failed": "FAILED",
    "interrupted": "KILLED",
}


class Mlflow:
    """One run of an experiment, found again by a tag that holds the id of the run.

    A metric that is sent twice is there once: its stores know it by name, step, time and value.
    No store of MLflow can take a metric back, so a step that is done again has two values.
    """

    def __init__(self, *, experiment: str, tracking_uri: str | None) -> None:
        self._experiment = experiment
        self._uri = tracking_uri
        self._library = _library()
        self._client: Any
        self._run_id: str
        self._metrics: list[Any] = []
        self._tables: list[tuple[str, dict[str, Any]]] = []
        self._last_time: float | None = None

    def open(self, run: TrackedRun) -> None:
        """Find or make the experiment and the run, and leave the settings there."""
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or _own_store(run.own_folder)
        self._client = self._library.MlflowClient(tracking_uri=uri)
        is_store = uri.startswith("sqlite:")
        self.shown_by = f"mlflow ui --backend-store-uri {uri}" if is_store else uri
        experiment_id = self._experiment_id(uri)
        found = self._client.search_runs(
            [experiment_id], filter_string=f"tags.`{RUN_ID_TAG}` = '{run.id}'", max_results=1
        )
        if found:
            (shown,) = found
            self._client.update_run(shown.info.run_id, status="RUNNING", name=run.name)
        else:
            shown = self._client.create_run(
                experiment_id, tags={RUN_ID_TAG: run.id}, run_name=run.name
            )
        self._run_id = shown.info.run_id
        self._describe(run, known=shown.data.params)

    def log(self, record: Record) -> None:
        at = round(record.time * 1000)
        make = self._library.entities.Metric
        self._metrics += [
            make(metric_name(k), v, at, record.step) for k, v in record.numbers.items()
        ]
        self._last_time = record.time

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Keep the table until `flush`; it becomes a file of the run."""
        texts = [asdict(row) for row in rows]
        table = {"columns": list(texts[0]), "data": [list(row.values()) for row in texts]}
        self._tables.append((f"episodes/{rows[0].purpose}/step_{step}.json", table))

    def flush(self) -> None:
        """Send everything, in calls as large as a server takes."""
        for part in _parts(self._metrics, _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=part)
        for path, table in self._tables:
            self._client.log_dict(self._run_id, table, path)
        self._metrics.clear()
        self._tables.clear()

    def close(self, outcome: RunOutcome) -> None:
        """Note how the run ended; one that was killed is still shown as running."""
        if outcome in _ENDINGS:
            ended = None if self._last_time is None else round(self._last_time * 1000)
            self._client.set_terminated(self._run_id, _ENDINGS[outcome], ended)

    def _experiment_id(self, uri: str) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        if known is None:
            place = _place_of_files(uri)
            return str(self._client.create_experiment(self._experiment, artifact_location=place))
        if known.lifecycle_stage != "active":
            raise ConfigError(
                f"the experiment {self._experiment!r} of MLflow is deleted; restore it there, or "
                "choose another `experiment`"
            )
        return str(known.experiment_id)

    def _describe(self, run: TrackedRun, known: Mapping[str, str]) -> None:
        """The settings as one file, and each that fits as a parameter.

        MLflow refuses a second value of a parameter: after a resume with other settings the
        parameters are the first ones, and the file holds the last.
        """
        entities = self._library.entities
        tags = {
            "gradus.version": run.code_version,
            "gradus.kind": run.kind,
            "gradus.group": run.group or "",
            "gradus.tags": ", ".join(run.tags),
        }
        self._client.log_batch(
            self._run_id, tags=[entities.RunTag(key, value[:500]) for key, value in tags.items()]
        )
        settings = [
            entities.Param(metric_name(key), value)
            for key, value in ((key, _shown(it)) for key, it in leaves(run.config))
            if len(value) <= _LONGEST_SETTING and metric_name(key) not in known
        ]
        for part in _parts(settings, _SETTINGS_PER_CALL):
            self._client.log_batch(self._run_id, params=part)
        self._client.log_dict(self._run_id, dict(run.config), "config.json")
        self._client.log_dict(self._run_id, dict(run.packages), "packages.json")


def metric_name(name: str) -> str:
    """The name as MLflow takes it; each character that it refuses becomes `_x`, its code, `_`.

    Letters, digits and `_ - . : / space` stay, so almost every name is unchanged. MLflow refuses
    names that are not paths in normal form, too: parts that are empty, `.` or `..` are replaced.
    Only a name of more than 250 characters cannot be read back: it is cut and ends in a digest.

    >>> [metric_name(name) for name in ("loss/total/mean", "reward/f(x)/mean")]
    ['loss/total/mean', 'reward/f_x28_x_x29_/mean']
    """
    plain = _REFUSED.sub(lambda found: f"_x{ord(found[0]):x}_", name)
    named = "/".join(_NO_PARTS.get(part, part) for part in plain.split("/"))
    if len(named) <= _LONGEST_NAME:
        return named
    return f"{named[:230]}.{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


def name_of_metric(named: str) -> str:
    """The name that `metric_name` replaced.

    >>> name_of_metric("reward/f_x28_x_x29_/mean")
    'reward/f(x)/mean'
    """
    return re.sub("_x([0-9a-f]*)_", lambda found: chr(int(found[1], 16)) if found[1] else "", named)


def _own_store(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{(folder / 'mlflow.db').absolute()}"


def _place_of_files(uri: str) -> str | None:
    """Beside a SQLite file, where MLflow would take the current folder; elsewhere as it likes."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "artifacts").as_uri()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _library() -> Any:
    """The package, without its telemetry, and without its own retries of many minutes."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    return library("mlflow")

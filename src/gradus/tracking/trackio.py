"""Trackio: numbers in a SQLite file that `trackio show` turns into a page, without any account."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shlex
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.run.records import Record
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun, library


class Trackio:
    """One run in Trackio's store on this machine; nothing goes over the network.

    Trackio's own `Run` drops what it cannot write, with a warning. So the rows go straight into its
    store, which raises. Each has an id made of what it holds, by which the store knows it again: a
    record that is sent twice is there once.
    """

    def __init__(self, *, project: str, folder: str | None) -> None:
        self._project = project
        self._folder = folder
        self._run: TrackedRun
        self._rows: list[tuple[int, float, dict[str, Any]]] = []
        self._last_time = 0.0

    def open(self, run: TrackedRun) -> None:
        """Void what the run does again, and write its configuration."""
        self._run = run
        folder = self._folder or os.environ.get("TRACKIO_DIR") or str(run.own_folder)
        place = Path(folder).expanduser().absolute()
        self.shown_by = f"TRACKIO_DIR={shlex.quote(str(place))} trackio show"
        self._library = _library(place)
        self._store = self._library.sqlite_storage.SQLiteStorage
        try:
            self._store.validate_project_name(self._project)
        except ValueError as error:
            raise ConfigError(f"trackio refuses project = {self._project!r}: {error}") from error
        path = self._store.init_db(self._project)
        if run.resume_step is not None:
            _void(path, run.id, run.resume_step)

    def log(self, record: Record) -> None:
        self._rows.append((record.step, record.time, record.numbers))
        self._last_time = record.time

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        table = {"_type": self._library.Table.TYPE, "_value": [asdict(row) for row in rows]}
        self._rows.append((step, self._last_time, {f"episodes/{rows[0].purpose}": table}))

    def alert(self, title: str, text: str, step: int) -> None:
        when = datetime.fromtimestamp(self._last_time, UTC).isoformat()
        self._store.bulk_alert(
            project=self._project,
            run=self._run.name,
            run_id=self._run.id,
            titles=[title],
            texts=[text],
            levels=["warn"],
            steps=[step],
            timestamps=[when],
            alert_ids=[hashlib.sha256(f"{self._run.id}{step}{title}{text}".encode()).hexdigest()],
        )

    def flush(self) -> None:
        if not self._rows:
            return
        self._store.bulk_log(
            project=self._project,
            run=self._run.name,
            run_id=self._run.id,
            metrics_list=[values for _, _, values in self._rows],
            steps=[step for step, _, _ in self._rows],
            timestamps=[datetime.fromtimestamp(at, UTC).isoformat() for _, at, _ in self._rows],
            log_ids=[self._id_of(row) for row in self._rows],
            config=self._config(),
        )
        self._rows.clear()

    def close(self, outcome: RunOutcome) -> None:
        """Trackio does not note how a run ended; nothing is open between two flushes."""

    def _id_of(self, row: tuple[int, float, dict[str, Any]]) -> str:
        text = json.dumps([self._run.id, *row])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _config(self) -> dict[str, Any]:
        """Trackio keeps three keys of its own among the settings; the page sorts runs by them."""
        run = self._run
        known = self._store.get_run_config(self._project, run_id=run.id) or {}
        return {
            **run.config,
            "code_version": run.code_version,
            "packages": dict(run.packages),
            "tags": list(run.tags),
            "kind": run.kind,
            "_Username": None,
            "_Created": known.get("_Created") or datetime.now(UTC).isoformat(),
            "_Group": run.group,
        }


def _library(folder: Path) -> Any:
    """The package, which reads once, when it is imported, where its store lies."""
    before = os.environ.get("TRACKIO_DIR")
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        trackio = library("trackio")
        importlib.import_module("trackio.sqlite_storage")
    finally:
        if before is None:
            del os.environ["TRACKIO_DIR"]
        else:
            os.environ["TRACKIO_DIR"] = before
    if folder != trackio.utils.TRACKIO_DIR:
        raise ConfigError(
            f"trackio has one folder in a process, {trackio.utils.TRACKIO_DIR}, and cannot use "
            f"{folder} too; give all trackers of this type the same `folder`"
        )
    return trackio


def _void(database: Path, run_id: str, step: int) -> None:
    """Take out what the run does again; Trackio has no call for it."""
    with closing(sqlite3.connect(database, timeout=30.0)) as connection, connection:
        connection.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (run_id, step))

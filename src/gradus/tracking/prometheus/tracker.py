"""The tracker that waits to be asked: `/metrics` of a run, for Prometheus.

It shows the records of the last step, the last evaluation, and `live.json` as it is at the moment
of the scrape. What a number is called says `names.py`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gradus.files import write_json
from gradus.monitor.live import read_live
from gradus.run.paths import RunDirectory
from gradus.run.records import Record, read_records
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun
from gradus.tracking.prometheus.exposition import Page
from gradus.tracking.prometheus.names import export
from gradus.tracking.prometheus.server import PATH, MetricsServer

LIVE_UNTIL_SECONDS = 15.0
"""Older gauges of `live.json` are of a process that ended or hangs, and are not shown."""
_STEPS = "step"
_KEPT_STAGES = ("eval", "validation")
"""Recorded now and then: their numbers stay until there are newer ones."""


class Prometheus:
    """Owns the page of one run, and the server that shows it.

    >>> Prometheus(host="127.0.0.1", port=0).open(run)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        last_scrape_seconds: float = 20.0,
    ) -> None:
        """Who scrapes regularly gets `last_scrape_seconds` at the end for a last look."""
        self._host = host
        self._port = port
        self._last_scrape_seconds = last_scrape_seconds
        self._server: MetricsServer | None = None
        self._board: NumberBoard | None = None
        self._targets: Path | None = None

    def open(self, run: TrackedRun) -> None:
        """Listen; ProcessError where the port is taken. Earlier records come from the file."""
        directory = RunDirectory(run.folder)
        self._board = NumberBoard(run, directory)
        for record in read_records(directory.metrics):
            self._board.add(record)
        self._server = MetricsServer(self._board.text, host=self._host, port=self._port)
        self._targets = directory.prometheus_targets(run.tracker)
        # The form that `file_sd_configs` reads, so that Prometheus finds the port by itself.
        write_json(
            self._targets,
            [{"targets": [self._server.address], "labels": {"__metrics_path__": PATH}}],
        )
        self._say(directory, f"Prometheus finds the run at http://{self._server.address}{PATH}")

    def log(self, record: Record) -> None:
        """The newest record of each kind is shown."""
        assert self._board is not None, "not open"
        self._board.add(record)

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Prometheus has no place for texts."""

    def flush(self) -> None:
        """Nothing is under way: Prometheus comes for it."""

    def close(self, outcome: RunOutcome) -> None:
        """Show how the run ended until the next scrape, if there is one soon; then stop."""
        if self._server is None or self._board is None:
            return
        self._board.end(outcome)
        if outcome != "unknown":
            self._server.wait_for_scrape(at_most_seconds=self._last_scrape_seconds)
        self._server.close()
        self._server = None
        if self._targets is not None:
            with contextlib.suppress(OSError):
                self._targets.unlink()

    def _say(self, directory: RunDirectory, line: str) -> None:
        """On the console of the run; what cannot be written is in the file of targets at least."""
        with contextlib.suppress(OSError), directory.notices.open("a") as file:
            file.write(f"{line}\n")


class NumberBoard:
    """Owns the numbers that are shown; records come from one thread, scrapes from another.

    >>> board = NumberBoard(run, RunDirectory(run.folder))  # doctest: +SKIP
    >>> board.text()  # doctest: +SKIP
    '# HELP gradus_...'
    """

    def __init__(
        self, run: TrackedRun, directory: RunDirectory, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._run = run
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: dict[str, dict[str, float]] = {}
        """Kind of record → the numbers of its newest step."""
        self._newest: dict[str, int] = {}
        self._recorded_at = 0.0
        self._outcome: RunOutcome | None = None

    def add(self, record: Record) -> None:
        """Show a record: of a newer step in place of what was there, of the same step beside it."""
        numbers = record.numbers
        with self._lock:
            self._recorded_at = max(self._recorded_at, record.time)
            for kind in sorted({_kind(name) for name in numbers}):
                newest = self._newest.get(kind, record.step)
                if record.step < newest:
                    continue  # The follower sends again what `open` read from the file.
                old = self._shown.get(kind, {}) if record.step == newest else {}
                self._shown[kind] = old | {n: v for n, v in numbers.items() if _kind(n) == kind}
                self._newest[kind] = record.step

    def end(self, outcome: RunOutcome) -> None:
        """The run ended."""
        with self._lock:
            self._outcome = outcome

    def text(self) -> str:
        """The page of this moment."""
        page = Page({"run": self._run.name})
        with self._lock:
            self._add_run(page)
            for numbers in self._shown.values():
                _add_metrics(page, numbers)
        self._add_live(page)
        self._add_processes(page)
        return page.text()

    def _add_run(self, page: Page) -> None:
        facts = {"kind": self._run.kind, "id": self._run.id, "version": self._run.code_version}
        page.add("gradus_run_info", 1.0, help="1; labels say what runs.", labels=facts)
        if _STEPS in self._newest:
            text = "Step of the last record, from 0."
            page.add("gradus_step", float(self._newest[_STEPS]), help=text)
        if self._recorded_at:
            text = "Unix time of the last record."
            page.add("gradus_record_timestamp_seconds", self._recorded_at, help=text)
        for outcome in ("done", "solved", "failed", "interrupted"):
            text = "1 for how the run ended; all 0 while it goes on."
            is_this = float(outcome == self._outcome)
            page.add("gradus_run_ended", is_this, help=text, labels={"outcome": outcome})

    def _add_live(self, page: Page) -> None:
        live = read_live(self._directory.live)
        if live is None:
            return
        text = "Unix time of the last look at the queues."
        page.add("gradus_live_timestamp_seconds", live.time, help=text)
        is_old = self._clock() - live.time > LIVE_UNTIL_SECONDS
        shown = {k: v for k, v in live.numbers.items() if not is_old or k.endswith("/total")}
        _add_metrics(page, shown)

    def _add_processes(self, page: Page) -> None:
        text = "Unix time of the last sign of life of a process."
        for process, seconds in _heartbeats(self._directory.alive).items():
            labels = {"process": process}
            page.add("gradus_process_alive_timestamp_seconds", seconds, help=text, labels=labels)


def _add_metrics(page: Page, numbers: Mapping[str, float]) -> None:
    for metric, value in numbers.items():
        found = export(metric)
        page.add(
            found.name, value * found.scale, help=found.help, kind=found.kind, labels=found.labels
        )


def _heartbeats(folder: Path) -> dict[str, float]:
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".json"]
    except OSError:
        return {}
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):  # It was replaced or deleted a moment ago.
            found[path.stem] = os.stat(path).st_mtime
    return found


def _kind(name: str) -> str:
    """Which records bring a metric: those of steps, or some that come now and then."""
    stage = name.partition("/")[0]
    return stage if stage in _KEPT_STAGES else _STEPS

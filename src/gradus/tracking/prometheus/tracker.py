"""The tracker that waits to be asked: `/metrics` of a run, for Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from gradus.files import add_line, write_json
from gradus.run.paths import RunDirectory
from gradus.run.records import Record, read_records
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun
from gradus.tracking.prometheus.board import NumberBoard
from gradus.tracking.prometheus.server import MetricsServer

PATH = "/metrics"


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
            self._board.add(run.chosen(record))
        self._server = MetricsServer(self._board, host=self._host, port=self._port)
        self._targets = directory.prometheus_targets(run.tracker)
        # The form that `file_sd_configs` reads, so that Prometheus finds the port by itself.
        write_json(
            self._targets,
            [{"targets": [self._server.address], "labels": {"__metrics_path__": PATH}}],
        )
        add_line(
            directory.notices, f"Prometheus finds the run at http://{self._server.address}{PATH}"
        )

    def log(self, record: Record) -> None:
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

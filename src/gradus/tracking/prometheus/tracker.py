"""The tracker that waits to be asked: `/metrics` of a run, for Prometheus, by its own library; no
client can hold it up for long."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from gradus.errors import ProcessError
from gradus.files import add_line, write_json
from gradus.run.paths import RunDirectory
from gradus.run.records import Record, read_records
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun
from gradus.tracking.prometheus.board import NumberBoard

PATH = "/metrics"
CLIENT_SECONDS = 10.0
"""For each part that a client sends or takes."""
MAX_CLIENTS = 32
"""One more is cut off."""
_POLL_SECONDS = 0.05
_LATE = 1.5
"""A scraper that is late by half its pace does not come any more."""


class MetricsServer:
    """Owns the socket and the threads; answers with what the collector gives then."""

    def __init__(self, collector: Collector, *, host: str, port: int) -> None:
        """Listens when it returns; port 0 lets the system choose. ProcessError when it cannot."""
        registry = CollectorRegistry()
        registry.register(collector)
        self._page: Callable[..., list[bytes]] = make_wsgi_app(registry)
        self._scraped = threading.Condition()
        self._num_scrapes = 0
        self._scraped_at = 0.0
        self._pace_seconds: float | None = None
        """Between the last two scrapes."""
        self._server = _bind(host, port)
        self._server.set_app(self._answer)
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(_POLL_SECONDS,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._server.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def wait_for_scrape(self, *, at_most_seconds: float) -> bool:
        """Whether somebody scrapes from now on; waits while one who comes regularly is due."""
        with self._scraped:
            if self._pace_seconds is None:
                return False
            due = self._scraped_at + _LATE * self._pace_seconds - time.monotonic()
            before = self._num_scrapes
            wait = max(0.0, min(due, at_most_seconds))
            return self._scraped.wait_for(lambda: self._num_scrapes > before, wait)

    def close(self) -> None:
        """Take no more clients; those that are there are served to their end."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        return _Answer(self._page(environ, start_response), self._note_scrape)

    def _note_scrape(self) -> None:
        with self._scraped:
            now = time.monotonic()
            if self._num_scrapes:
                self._pace_seconds = now - self._scraped_at
            self._num_scrapes += 1
            self._scraped_at = now
            self._scraped.notify_all()


class _Answer(list[bytes]):
    """A body that says when all of it was sent; the server calls `close` then."""

    def __init__(self, body: list[bytes], sent: Callable[[], None]) -> None:
        super().__init__(body)
        self.close = sent


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, *_: object) -> None:
        """Scrapes are not worth a line."""


class _Server(ThreadingWSGIServer):
    """Serves a bounded number of clients, each in a thread."""

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        self._places = threading.Semaphore(MAX_CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without asking for the name of the host: a name server may let us wait for long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, *_: object) -> None:
        """A client that hangs or leaves is not our fault."""


def _bind(host: str, port: int) -> _Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _Server((str(address[0]), int(address[1])), family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ProcessError(
                f"port {port} of {host} is taken; choose another port of the monitor "
                '"prometheus", or 0, which lets the system choose'
            ) from error
        raise ProcessError(
            f'the monitor "prometheus" cannot listen at {host}, port {port}: {error}'
        ) from error


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

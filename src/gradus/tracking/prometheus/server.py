"""A small HTTP server with one page, on a thread of its own; no client can hold it up.

A client gets `HEAD_SECONDS` for its request and `SEND_SECONDS` to take the answer, whatever it
sends; a head beyond `MAX_HEAD_BYTES` is refused, and so is a client beyond `MAX_CLIENTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from gradus.errors import ProcessError
from gradus.log import get_logger
from gradus.tracking.prometheus.exposition import CONTENT_TYPE

PATH = "/metrics"
HEAD_SECONDS = 5.0
SEND_SECONDS = 10.0
MAX_HEAD_BYTES = 16 * 1024
MAX_CLIENTS = 32
_END_SECONDS = 5.0
_LATE = 1.5
"""A scraper that is late by half its pace does not come any more."""

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a client gets, after which its connection ends."""

    status: HTTPStatus
    text: str
    has_body: bool = True

    @property
    def bytes(self) -> bytes:
        """Head and body."""
        body = self.text.encode("utf-8", "replace")
        is_page = self.status is HTTPStatus.OK
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {CONTENT_TYPE if is_page else 'text/plain; charset=utf-8'}",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "Connection: close",
            "\r\n",
        )
        return "\r\n".join(head).encode() + (body if self.has_body else b"")


_TOO_MANY = Answer(HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")


class MetricsServer:
    """Owns the socket and the thread; answers `GET /metrics` with what `page` gives then.

    >>> server = MetricsServer(lambda: "", host="127.0.0.1", port=0)  # doctest: +SKIP
    >>> server.address, server.close()  # doctest: +SKIP
    ('127.0.0.1:43121', None)
    """

    def __init__(self, page: Callable[[], str], *, host: str, port: int) -> None:
        """Listens when it returns; port 0 lets the system choose. ProcessError when it cannot."""
        self._page = page
        self._socket = _bind(host, port)
        self._num_clients = 0
        self._scraped = threading.Condition()
        self._num_scrapes = 0
        self._scraped_at = 0.0
        self._pace_seconds: float | None = None
        """Between the last two scrapes."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Host and port, as a scraper wants them."""
        host, port = self._socket.getsockname()[:2]
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
        """Close the socket and every connection."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # It ended a moment ago.
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_END_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            _LOG.error("the page for Prometheus ends: %s: %s", type(error).__name__, error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Answer until `close`; clients that are still there are cut off."""
        server = await asyncio.start_server(
            self._handle, sock=self._socket, limit=MAX_HEAD_BYTES, start_serving=True
        )
        try:
            await self._stop.wait()
        finally:
            # asyncio loses the socket of a client that it accepted as the server closes.
            self._loop.remove_reader(self._socket.fileno())
            await _some_turns()
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await _some_turns()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # `drain` then waits until the client has taken all of it.
        writer.transport.set_write_buffer_limits(high=0)
        self._num_clients += 1
        try:
            # A client that hangs or leaves is its own affair.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                is_full = self._num_clients > MAX_CLIENTS
                answer = _TOO_MANY if is_full else await self._answer(reader)
                async with asyncio.timeout(SEND_SECONDS):
                    writer.write(answer.bytes)
                    await writer.drain()
                if answer.status is HTTPStatus.OK:
                    self._note_scrape()
        finally:
            self._num_clients -= 1
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return Answer(too_large, "the head of the request is too large\n")
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return Answer(HTTPStatus.BAD_REQUEST, "this is no HTTP request\n")
        method, path = words[0], words[1].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered\n")
        if path != PATH.encode():
            return Answer(HTTPStatus.NOT_FOUND, f"the numbers are at {PATH}\n")
        try:
            return Answer(HTTPStatus.OK, self._page(), has_body=method == b"GET")
        except Exception as error:  # The page reads files of others; the next one may be fine.
            _LOG.exception("no page for Prometheus")
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n")

    def _note_scrape(self) -> None:
        with self._scraped:
            now = time.monotonic()
            if self._num_scrapes:
                self._pace_seconds = now - self._scraped_at
            self._num_scrapes += 1
            self._scraped_at = now
            self._scraped.notify_all()


async def _some_turns() -> None:
    """Let the event loop finish what it began with a connection."""
    for _ in range(5):
        await asyncio.sleep(0)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ProcessError(
                f"port {port} of {host} is taken; choose another port of the monitor "
                '"prometheus", or 0, which lets the system choose'
            ) from error
        raise ProcessError(
            f'the monitor "prometheus" cannot listen at {host}, port {port}: {error}'
        ) from error

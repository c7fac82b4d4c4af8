"""One HTTP server on a socket that is bound already, until somebody says why it must end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from gradus.errors import GradusError, ProcessError

MAX_CONNECTIONS = 8192
KEEP_ALIVE_SECONDS = 120
GRACE_SECONDS = 1
POLL_SECONDS = 0.02


class Stop:
    """Why the server ends: it was asked to, or something failed; the first reason counts.

    stop = Stop()
    stop.fail(ProcessError("the engine's process ended"))
    """

    def __init__(self) -> None:
        self.error: GradusError | None = None
        self._event = asyncio.Event()

    def ask(self) -> None:
        """End without an error."""
        self._event.set()

    def fail(self, error: GradusError) -> None:
        """End, and raise `error` from the server."""
        if not self._event.is_set():
            self.error = error
        self._event.set()

    async def wait(self) -> None:
        """Return once there is a reason."""
        await self._event.wait()


class HttpServer(uvicorn.Server):
    """uvicorn that leaves SIGTERM and SIGINT to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def build_http_server(app: Any) -> HttpServer:
    """A server for the ASGI application `app`, silent, with keep-alive longer than clients'."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=2048,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ws="none",
    )
    return HttpServer(config)


def base_url_of(listener: socket.socket) -> str:
    """The address of a bound socket as a URL without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_until_stopped(
    server: HttpServer,
    listener: socket.socket,
    *,
    stop: Stop,
    when_listening: Callable[[str], Awaitable[None]],
) -> None:
    """Serve on `listener`; `when_listening(base_url)` runs once requests are answered.

    Returns when `stop` was asked, raises what `stop` was failed with; SIGTERM and SIGINT ask.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)
    serving = asyncio.create_task(_serve(server, listener, stop))
    preparing = asyncio.create_task(_prepare(server, listener, stop, when_listening))
    try:
        await stop.wait()
    finally:
        preparing.cancel()
        server.should_exit = True
        await asyncio.wait({serving, preparing})
    if stop.error is not None:
        raise stop.error


async def _serve(server: HttpServer, listener: socket.socket, stop: Stop) -> None:
    try:
        await server.serve(sockets=[listener])
    except (OSError, SystemExit) as error:
        stop.fail(ProcessError(f"the HTTP server failed: {error}"))
    stop.fail(ProcessError("the HTTP server ended by itself"))


async def _prepare(
    server: HttpServer,
    listener: socket.socket,
    stop: Stop,
    when_listening: Callable[[str], Awaitable[None]],
) -> None:
    while not server.started:
        await asyncio.sleep(POLL_SECONDS)
    try:
        await when_listening(base_url_of(listener))
    except GradusError as error:
        stop.fail(error)
    except Exception as error:
        stop.fail(ProcessError(f"the server did not become ready: {error!r}"))

"""One HTTP server on a bound socket, until there is a reason to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gradus.errors import DeadlineError, GradusError, ProcessError
from gradus.processes.secured import server_context

MAX_CONNECTIONS = 8192
KEEP_ALIVE_SECONDS = 120
HEADER_SECONDS = 10.0
"""How long a client may take to send the head of a request."""
BODY_SECONDS = 60.0
"""How long it may then take to send the body."""
GRACE_SECONDS = 1
POLL_SECONDS = 0.02
NUM_PARALLEL = 4
"""Requests at once that warm a new server up."""


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
        await self._event.wait()


class DeadlineProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol that closes a connection whose request does not arrive.

    uvicorn itself waits forever for the end of a head or a body, so a client that sends only half
    of it keeps a connection of the server.
    """

    _deadline: asyncio.TimerHandle | None = None
    _seen: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The first request is due from now on."""
        super().connection_made(transport)
        self._expect(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Set the deadline for what the client still owes."""
        super().data_received(data)
        request = self.cycle
        if request is None:
            return
        if request is not self._seen:
            self._seen = request
            self._expect(BODY_SECONDS if request.more_body else None)
        elif not request.more_body and not request.response_complete:
            self._expect(None)
        elif request.response_complete and self._deadline is None:
            self._expect(HEADER_SECONDS)

    def _expect(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self.transport.abort)


class HttpServer(uvicorn.Server):
    """uvicorn that leaves SIGTERM and SIGINT to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build_http_server(app: Any) -> HttpServer:
    """A server for the ASGI application `app`, silent, with keep-alive longer than clients'."""
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol,
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
    config.load()
    config.ssl = server_context()
    return HttpServer(config)


def base_url_of(listener: socket.socket, *, is_encrypted: bool = False) -> str:
    """The address of a bound socket as a URL without a path."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
        if stop.error is not None:
            # What failed here fails others soon, who are blamed unless this process ends first.
            server.config.timeout_graceful_shutdown = 0
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
        await when_listening(base_url_of(listener, is_encrypted=server.config.ssl is not None))
    except GradusError as error:
        stop.fail(error)
    except Exception as error:
        stop.fail(ProcessError(f"the server did not become ready: {error!r}"))


async def warm_up(base_url: str, token: str, *, timeout_seconds: float) -> None:
    """Return once generate requests were answered, alone and in parallel, over the real socket.

    So that no episode pays for the first ones. DeadlineError after `timeout_seconds`; ProcessError
    when the server answers with an error.
    """
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            aiohttp.ClientSession(
                base_url,
                headers=headers,
                # Its own socket, whatever name its certificate is for.
                connector=aiohttp.TCPConnector(ssl=False),
            ) as session,
        ):
            await _generate(session, max_tokens=1)
            await asyncio.gather(*[_generate(session, max_tokens=2) for _ in range(NUM_PARALLEL)])
    except TimeoutError as error:
        raise DeadlineError(
            f"the inference server at {base_url} did not answer a generate request within "
            f"{timeout_seconds:.0f} s"
        ) from error


async def _generate(session: aiohttp.ClientSession, *, max_tokens: int) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 1}
    sampling |= {"ignore_eos": True, "seed": None}
    body = {"token_ids": [0], "sampling_params": sampling, "cache_salt": "warm-up"}
    async with session.post("/inference/v1/generate", json=body) as response:
        if response.status != 200:
            text = await response.text()
            raise ProcessError(f"the first generate request got {response.status}: {text[:500]}")

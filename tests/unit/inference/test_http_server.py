"""The HTTP server does not wait for ever for requests that never arrive."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gradus.inference import http_server
from gradus.inference.http_server import Stop, build_http_server, serve_until_stopped

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SHORT_SECONDS = 0.3
REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"


async def answer_slowly(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """An application that reads the body and takes longer than a client may."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    loop.call_later(2 * SHORT_SECONDS, is_over.set)
    await is_over.wait()
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    await send(head)
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(http_server, "BODY_SECONDS", SHORT_SECONDS)


@asynccontextmanager
async def connected() -> AsyncIterator[Stream]:
    """A connection to a server that runs."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop, listening = Stop(), asyncio.Event()

    async def listens(_: str) -> None:
        listening.set()

    server = build_http_server(answer_slowly)
    serving = asyncio.create_task(
        serve_until_stopped(server, listener, stop=stop, when_listening=listens)
    )
    await listening.wait()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        stop.ask()
        await serving


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes; TimeoutError when it does not."""
    async with asyncio.timeout(20 * SHORT_SECONDS):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.shows("F65", "SEC8")
@pytest.mark.parametrize(
    "part",
    [b"", b"POST / HT", REQUEST[:30], REQUEST[:-2]],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
async def test_a_request_that_does_not_arrive_is_given_up(
    short_deadlines: None, part: bytes
) -> None:
    async with connected() as (reader, writer):
        writer.write(part)
        assert await read_to_the_end(reader) == b""


@pytest.mark.shows("SEC8", "SEC40")
async def test_connections_beyond_their_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)
    async with connected() as (_, first):
        address = first.get_extra_info("peername")
        opened = [await asyncio.open_connection(*address) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REQUEST)
        assert (await reader.readline()).split()[1] == b"503"
        for it in (writer, *(writer for _, writer in opened)):
            it.close()


async def test_an_answer_may_take_longer_than_a_request(short_deadlines: None) -> None:
    async with connected() as (reader, writer):
        writer.write(REQUEST)
        async with asyncio.timeout(20 * SHORT_SECONDS):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(REQUEST[:30])
        assert await read_to_the_end(reader) == b""

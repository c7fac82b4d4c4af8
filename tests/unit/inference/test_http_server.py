"""The HTTP server does not wait for ever for requests that never arrive."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from secured_servers import certify

from gradus.inference import http_server
from gradus.inference.guard import Guard, Tokens
from gradus.inference.http_server import Stop, Upgrade, build_http_server, serve_until_stopped
from gradus.processes.secured import client_context

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
async def connected(upgrade: Upgrade | None = None) -> AsyncIterator[Stream]:
    """A connection to a server that runs."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop, listening = Stop(), asyncio.Event()

    async def listens(_: str) -> None:
        listening.set()

    server = build_http_server(answer_slowly, upgrade)
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


class Shout(asyncio.Protocol):
    """Answers with what it gets, in capitals."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data.upper())


TOKENS = Tokens.of(data="d" * 64, admin="a" * 64)
UPGRADE = Upgrade(
    route=("GET", "/gradus/tokens"),
    name="shout",
    accepted=b"HTTP/1.1 101 Yes\r\n\r\n",
    refusal_of=Guard(answer_slowly, TOKENS).refusal_of,
    open=Shout,
)


def asks_to_shout(token: str, *, path: str = "/gradus/tokens", name: str = "shout") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Connection: Upgrade\r\nUpgrade: {name}\r\n\r\n"
    ).encode()


async def test_a_connection_changes_to_the_protocol_that_is_offered() -> None:
    async with connected(UPGRADE) as (reader, writer):
        writer.write(asks_to_shout("d" * 64))
        assert await reader.readexactly(len(UPGRADE.accepted)) == UPGRADE.accepted
        writer.write(b"hear me")
        assert await reader.readexactly(7) == b"HEAR ME"


async def test_an_upgraded_connection_may_be_silent(short_deadlines: None) -> None:
    async with connected(UPGRADE) as (reader, writer):
        writer.write(asks_to_shout("d" * 64))
        await reader.readexactly(len(UPGRADE.accepted))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 3 * SHORT_SECONDS)
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"STILL HERE"


async def test_a_connection_that_was_asked_before_may_be_silent_after_its_upgrade(
    short_deadlines: None,
) -> None:
    async with connected(UPGRADE) as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(b"ok")
        writer.write(asks_to_shout("d" * 64))
        await reader.readexactly(len(UPGRADE.accepted))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 3 * SHORT_SECONDS)
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"STILL HERE"


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (asks_to_shout("wrong"), b"401 Unauthorized"),
        (asks_to_shout(""), b"401 Unauthorized"),
        (
            asks_to_shout("d" * 64).replace(
                b"\r\n\r\n", b"\r\nContent-Length: 99999999999\r\n\r\n"
            ),
            b"413",
        ),
    ],
    ids=["wrong token", "no token", "too long"],
)
async def test_the_guard_stands_before_an_upgrade(request_head: bytes, status: bytes) -> None:
    async with connected(UPGRADE) as (reader, writer):
        writer.write(request_head)
        answer = await read_to_the_end(reader)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"hear" not in answer


@pytest.mark.parametrize("other", [{"name": "websocket"}, {"path": "/gradus/status"}])
async def test_another_protocol_or_path_is_an_ordinary_request(other: dict[str, str]) -> None:
    for upgrade in (UPGRADE, None):
        async with connected(upgrade) as (reader, writer):
            writer.write(asks_to_shout("d" * 64, **other))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


@pytest.mark.shows("SEC40")
async def test_half_a_request_for_an_upgrade_is_closed(short_deadlines: None) -> None:
    async with connected(UPGRADE) as (reader, writer):
        writer.write(asks_to_shout("d" * 64)[:-2])
        assert await read_to_the_end(reader) == b""


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "to another node"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_upgraded_connection_does_not_keep_a_server_that_stops(
    run: Any, is_secured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_secured:
        certify(tmp_path, monkeypatch)

    async def play() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        stop, listening = Stop(), asyncio.Event()

        async def listens(_: str) -> None:
            listening.set()

        server = build_http_server(answer_slowly, UPGRADE)
        serving = asyncio.create_task(
            serve_until_stopped(server, listener, stop=stop, when_listening=listens)
        )
        await listening.wait()
        tls = client_context(is_own=True) if is_secured else None
        reader, writer = await asyncio.open_connection(*listener.getsockname(), ssl=tls)
        writer.write(asks_to_shout("d" * 64))
        await reader.readexactly(len(UPGRADE.accepted))
        writer.write(b"hear me")
        assert await reader.readexactly(7) == b"HEAR ME"
        stop.ask()
        async with asyncio.timeout(60):
            await serving
        writer.close()

    run(play())

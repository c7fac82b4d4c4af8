"""Bytes and messages that no server expects, and how they are thrown at its sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

import zmq
import zmq.asyncio
from listening import Listener

HTTP = (
    b"",
    b"\0" * 1000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET " + b"/x" * 200_000,
    b"POST / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\nx",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nbody!",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\xff\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\x88\xff\xff",
    b"GET /\xff\xfe%00%2e%2e/ HTTP/1.1\r\nHost: \xff\r\nCookie: \0\r\n\r\n",
)
"""What a connection sends before it goes away."""
READ_SECONDS = 0.05
"""How long an answer is waited for, so that the server reads before the connection is gone."""
NESTED = b"\x91" * 100_000
MESSAGES: tuple[list[bytes], ...] = (
    [b""],
    [b"", b""],
    [b"1", b"run"],
    [b"\xff\xfe", b"run", b"\xc1"],
    [b"\xff\xfe", b"\xff", b"\xff", b"\xff"],
    [b"1", b"no such method", b"\xc0"],
    [b"1", b"cancel", b"\x81\xaarequest_id\xa3\xff\xff\xff"],
    [b"1", b"cancel", NESTED],
    [b"1", b"run", NESTED],
    [b"1", b"run", b"\xdd\xff\xff\xff\xff"],
    [b"1", b"run", b"\xc6\xff\xff\xff\xff"],
    [b"1", b"run", b"\x81\xa6client\x81\xa8base_url\xa1x"],
    [b"x" * 1_000_000, b"health", b""],
    [b"1"] * 50,
)
"""Frames of ZMQ, of the wrong number, encoding, depth and length."""


async def throw_bytes(listener: Listener, content: Iterable[bytes] = HTTP) -> None:
    """Each on a connection of its own, which goes away soon."""
    for it in content:
        with contextlib.suppress(OSError):
            if listener.is_tcp:
                reader, writer = await asyncio.open_connection(listener.address, listener.port)
            else:
                reader, writer = await asyncio.open_unix_connection(listener.address)
            writer.write(it)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    await writer.drain()
                    await reader.read(1)
            writer.transport.abort()


async def throw_messages(listener: Listener) -> None:
    """Each from a peer that goes away once the message has left."""
    context = zmq.asyncio.Context()
    for frames in MESSAGES:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 50)
        socket.connect(f"ipc://{Path(listener.address)}")
        await socket.send_multipart(frames)
        socket.close()
    context.destroy(linger=50)

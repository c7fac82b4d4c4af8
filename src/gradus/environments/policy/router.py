"""One OpenAI server in front of several: each request goes to a replica that is up, and its answer
back as it comes.

A request that names its session (`X-Session-ID`) stays at one replica, whose prefix cache knows
what was said before; another one goes to the replica with the fewest requests. Where a replica
ends before a byte of its answer came, another is asked. The guard (`gradus.inference.guard`) stands
before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from gradus.environments.policy.replicas import Replicas
from gradus.log import get_logger
from gradus.processes.secured import client_context
from gradus.wire.inference import SESSION_HEADER

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECT_SECONDS = 5.0
log = get_logger(__name__)
_SESSION = SESSION_HEADER.lower().encode()
_OF_ONE_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"proxy-connection"),
    }
)
"""Headers that hold for one connection, not for what is behind it."""


class _Left(Exception):
    """The client went away."""


class _BrokenOff(Exception):
    """The replica ended within its answer, of which the client has the beginning.

    Nothing more is sent, and the server ends the connection: no client takes it for whole.
    """


@dataclass(frozen=True)
class _Asked:
    """One request of a client, complete."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    session_id: str | None
    body: bytes


class Router:
    """Owns the connections to the replicas; an ASGI application."""

    def __init__(self, addresses: Sequence[str], *, token: str | None = None) -> None:
        """`token` is that of the replicas, whatever clients send."""
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self.replicas = Replicas(addresses, is_there=self._is_there)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            asked = await self._read(scope, receive)
        except _Left:
            return
        answering = asyncio.ensure_future(self._answer(asked, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A client that left wants no answer: the replica is told by the end of its connection.
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled() and (error := answering.exception()) is not None:
            if not isinstance(error, _BrokenOff):
                raise error
            log.warning("%s", error)

    async def close(self) -> None:
        await self.replicas.close()
        if self._session is not None:
            await self._session.close()

    async def _read(self, scope: Scope, receive: Receive) -> _Asked:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = dict(scope["headers"])
        session_id = headers.get(_SESSION, b"").decode("latin-1") or None
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OF_ONE_HOP and name != b"authorization"
        ]
        if self._token is not None:
            kept.append(("Authorization", f"Bearer {self._token}"))
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        whole = f"{path}?{query}" if query else path
        return _Asked(scope["method"], whole, kept, session_id, bytes(body))

    async def _answer(self, asked: _Asked, send: Send) -> None:
        has_begun = False

        async def ask(address: str) -> None:
            nonlocal has_begun
            request = self._opened().request(
                asked.method,
                f"{address}{asked.path}",
                headers=asked.headers,
                data=asked.body or None,
                allow_redirects=False,
            )
            async with request as response:
                # Read before it is passed on: until then another replica may answer.
                first = await response.content.readany()
                has_begun = True
                await send(_head(response))
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for part in response.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await self.replicas.ask(asked.session_id, ask, may_ask_again=lambda: not has_begun)
        except (OSError, aiohttp.ClientError) as error:
            if has_begun:
                text = f"a replica ended within its answer to {asked.path}: {error}"
                raise _BrokenOff(text) from error
            text = f"no replica answers: {error}"
            body = msgspec.json.encode({"error": {"message": text, "code": 503}})
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
            status = int(HTTPStatus.SERVICE_UNAVAILABLE)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _is_there(self, address: str, is_settled: bool) -> bool:  # noqa: ARG002
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        async with self._opened().get(f"{address}/health", headers=headers) as response:
            return response.status == HTTPStatus.OK

    def _opened(self) -> aiohttp.ClientSession:
        # Made by the first request, because a session belongs to the running loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=client_context(is_own=True)),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(response: aiohttp.ClientResponse) -> Message:
    kept = [(name.lower(), value) for name, value in response.raw_headers]
    # The length stays: a client then knows a broken answer from a whole one.
    headers = [it for it in kept if it[0] not in _OF_ONE_HOP or it[0] == b"content-length"]
    return {"type": "http.response.start", "status": response.status, "headers": headers}

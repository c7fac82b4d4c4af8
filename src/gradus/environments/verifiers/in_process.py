"""The interception server of this process without HTTP: its own handlers, called as coroutines.

A harness inside the worker reached the server over a socket pair, an HTTP client and a server,
which cost more than everything that the server did with a call. Here the same handlers get the
same bytes and headers, so that bearers, limits, retries, branch matching and the trace are the
same. Programs that a harness starts keep using HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.interception.server import InterceptionServer

from gradus.log import get_logger

Handler = Callable[[Any], Awaitable[web.StreamResponse]]

log = get_logger(__name__)


class _Request(dict[Any, Any]):
    """What the server's handlers use of an aiohttp request; its items are the request's own."""

    def __init__(self, path: str, headers: Mapping[str, str], content: bytes) -> None:
        super().__init__()
        self.path = path
        self.headers: CIMultiDict[str] = CIMultiDict(headers)
        self._read_bytes: bytes | None = content

    async def read(self) -> bytes:
        """The body; the server forgets it here once it is parsed."""
        return self._read_bytes or b""


@dataclass
class LocalServer:
    """One running interception server of this process."""

    base_url: str
    handlers: Mapping[str, Handler]
    loop: asyncio.AbstractEventLoop
    bearers: Container[str] = ()
    """Those of the rollouts that it serves now."""
    is_open: bool = True

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer; aiohttp's errors where a connection would break.

        The call runs in a separate task, as on a real server: when the caller is cancelled it
        continues until the rollout is over, and the rollout's end cancels it and not the caller.
        """
        if not self.is_open:
            raise aiohttp.ClientConnectionError(f"the server at {self.base_url} is closed")
        path = url.removeprefix(self.base_url)
        handler = self.handlers.get(path)
        if handler is None:
            return HTTPStatus.NOT_FOUND, b"404: Not Found"
        answered = asyncio.Event()
        task = self.loop.create_task(_answer(handler, _Request(path, headers, content)))
        task.add_done_callback(lambda _: answered.set())
        await answered.wait()
        if task.cancelled():
            raise aiohttp.ServerDisconnectedError
        return task.result()


_running: dict[str, LocalServer] = {}


def remember(server: InterceptionServer) -> None:
    """Let harnesses of this process call a server that has started, until it stops."""
    handlers: dict[str, Handler] = {
        route: server._handler_for(dialect) for dialect in DIALECTS for route in dialect.routes
    }
    handlers["/tool"] = server.handle_tool
    local = LocalServer(
        server.base_url, handlers, asyncio.get_running_loop(), bearers=server.sessions
    )
    _running[local.base_url] = local

    def forget() -> None:
        local.is_open = False
        _running.pop(local.base_url, None)

    server.stack.callback(forget)


def local_server(endpoint: str) -> LocalServer | None:
    local = _running.get(endpoint.removesuffix("/v1"))
    return local if local is not None and local.loop is asyncio.get_running_loop() else None


def address_of(bearer: str) -> str | None:
    """The endpoint on this machine of the rollout with this bearer; None when it is not known.

    A rollout in a container is told the address that holds in there.
    """
    for local in _running.values():
        if bearer in local.bearers:
            return f"{local.base_url}/v1"
    return None


async def _answer(handler: Handler, request: _Request) -> tuple[int, bytes]:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = error
    except Exception:  # what aiohttp's server does with an error of a handler
        log.exception("an interception handler failed")
        return HTTPStatus.INTERNAL_SERVER_ERROR, b"500 Internal Server Error"
    assert isinstance(response, web.Response), "only a request that asks for it gets a stream"
    assert isinstance(response.body, bytes), "the server's answers are JSON"
    return response.status, response.body

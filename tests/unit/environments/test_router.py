"""One server in front of several: what goes through it, and what becomes of it where one ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gradus.environments.policy import replicas as routing
from gradus.environments.policy.router import Router
from gradus.inference.guard import Guard, ServedToken
from gradus.inference.http_server import Stop, build_http_server, serve_until_stopped
from gradus.processes.listening import bind

CLIENTS, OWN = "the-token-of-clients", "the-token-of-replicas"
PATH = "/v1/chat/completions"


class Stub:
    """A replica that answers in parts, and notes what it saw."""

    def __init__(self) -> None:
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.says_before = b""
        self._runner = web.AppRunner(self._app(), shutdown_timeout=0.1)
        self.url = ""

    def _app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post(PATH, self.chat), web.get("/health", self.health)])
        app.add_routes([web.get("/v1/models", self.refuse)])
        return app

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def end(self) -> None:
        """As a process that is killed: every connection ends."""
        server = self._runner.server
        if server is not None:
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._runner.cleanup()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.bodies.append(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Of": "it"})
        if self.says_before:
            await response.prepare(request)
            await response.write(self.says_before)
        self.begun.set()
        await self.goes_on.wait()
        if not self.says_before:
            await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if _token(request) == OWN else 401)

    async def refuse(self, _: web.Request) -> web.Response:
        return web.json_response({"error": "not now"}, status=429, headers={"Retry-After": "3"})


def _token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


@pytest.fixture
async def stubs() -> AsyncIterator[list[Stub]]:
    made = [Stub(), Stub()]
    for stub in made:
        await stub.start()
    yield made
    for stub in made:
        stub.goes_on.set()
        await stub.end()


@pytest.fixture
async def client(
    stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[aiohttp.ClientSession]:
    """Of the server in front, which lets in whom the guard knows."""
    monkeypatch.setattr(routing, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(routing, "GATE_SECONDS", 0.5)
    stop, ready = Stop(), asyncio.Event()
    router = Router([stub.url for stub in stubs], token=OWN)
    server = build_http_server(Guard(router, ServedToken.of(CLIENTS)))
    found: list[str] = []

    async def listens(base_url: str) -> None:
        found.append(base_url)
        ready.set()

    with bind("127.0.0.1", 0, allow_public_bind=False) as listener:
        serving = asyncio.ensure_future(
            serve_until_stopped(server, listener, stop=stop, when_listening=listens)
        )
        await ready.wait()
        headers = {"Authorization": f"Bearer {CLIENTS}"}
        async with aiohttp.ClientSession(found[0], headers=headers) as session:
            yield session
        stop.ask()
        await serving
        await router.close()


async def ask(client: aiohttp.ClientSession, session: str | None = None, **headers: str) -> bytes:
    named = {} if session is None else {"X-Session-ID": session}
    async with client.post(f"{PATH}?a=b", data=b'{"n": 1}', headers=named | headers) as response:
        assert (response.status, response.headers["X-Of"]) == (200, "it")
        return await response.read()


async def test_a_request_goes_through_whole_and_with_the_token_of_the_replicas(
    stubs: list[Stub], client: aiohttp.ClientSession
) -> None:
    assert await ask(client, "s", X_Own="1") == b"data: [DONE]\n\n"
    ((request,), (body,)) = next((it.seen, it.bodies) for it in stubs if it.seen)
    assert (request.path_qs, body) == (f"{PATH}?a=b", b'{"n": 1}')
    assert (_token(request), request.headers["X_Own"]) == (OWN, "1")


async def test_sessions_stay_and_requests_without_one_are_spread(
    stubs: list[Stub], client: aiohttp.ClientSession
) -> None:
    for _ in range(2):
        await asyncio.gather(*(ask(client, f"session {number}") for number in range(30)))
    homes = [{it.headers["X-Session-ID"] for it in stub.seen} for stub in stubs]
    assert all(len(it) > 5 for it in homes)
    assert not homes[0] & homes[1]


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("POST", PATH, "another", 401),
        ("POST", "/add_worker", CLIENTS, 404),
        ("GET", "/gradus/status", CLIENTS, 404),
        ("GET", "/v1/models", CLIENTS, 429),
    ],
)
async def test_the_guard_stands_before_and_a_refusal_of_a_replica_is_passed_on(
    stubs: list[Stub],
    client: aiohttp.ClientSession,
    method: str,
    path: str,
    token: str,
    status: int,
) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with client.request(method, path, headers=headers) as response:
        assert response.status == status
        assert (response.headers.get("Retry-After") == "3") == (status == 429)
    assert not any(stub.seen for stub in stubs)


async def test_an_answer_is_passed_on_as_it_comes(
    stubs: list[Stub], client: aiohttp.ClientSession
) -> None:
    for stub in stubs:
        stub.says_before = b"data: first\n\n"
        stub.goes_on.clear()
    async with client.post(PATH, data=b"{}") as response:
        assert await response.content.readany() == b"data: first\n\n"
        for stub in stubs:
            stub.goes_on.set()
        assert await response.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("says_before", [b"", b"data: first\n\n"], ids=["unanswered", "half"])
async def test_a_client_that_leaves_ends_its_request_at_the_replica(
    stubs: list[Stub], client: aiohttp.ClientSession, says_before: bytes
) -> None:
    async def post() -> None:
        async with client.post(PATH, data=b"{}", headers={"X-Session-ID": "s"}) as response:
            await response.read()

    for stub in stubs:
        stub.says_before = says_before
        stub.goes_on.clear()
    asking = asyncio.ensure_future(post())
    async with asyncio.timeout(10):
        begun = [asyncio.ensure_future(stub.begun.wait()) for stub in stubs]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        for waiting in begun:
            waiting.cancel()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        (stub,) = [stub for stub in stubs if stub.seen]
        while (transport := stub.seen[0].transport) is not None and not transport.is_closing():
            await asyncio.sleep(0)


async def test_a_request_without_an_answer_yet_is_asked_at_another_replica(
    stubs: list[Stub], client: aiohttp.ClientSession
) -> None:
    for stub in stubs:
        stub.goes_on.clear()
    asking = asyncio.ensure_future(ask(client, "s"))
    async with asyncio.timeout(10):
        begun = [asyncio.ensure_future(stub.begun.wait()) for stub in stubs]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        for waiting in begun:
            waiting.cancel()
        mine, other = sorted(stubs, key=lambda stub: not stub.seen)
        other.goes_on.set()
        await mine.end()
        assert await asking == b"data: [DONE]\n\n"
    assert mine.bodies == other.bodies == [b'{"n": 1}']


async def test_half_an_answer_is_never_taken_for_a_whole_one(
    stubs: list[Stub], client: aiohttp.ClientSession
) -> None:
    for stub in stubs:
        stub.says_before = b"data: first\n\n"
        stub.goes_on.clear()
    async with client.post(PATH, data=b"{}") as response:
        assert await response.content.readany() == b"data: first\n\n"
        await next(stub for stub in stubs if stub.seen).end()
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert sum(len(stub.seen) for stub in stubs) == 1


async def test_half_an_answer_ends_also_while_whole_requests_wait_for_a_replica(
    stubs: list[Stub], client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "GATE_SECONDS", 900.0)
    for stub in stubs:
        stub.says_before = b"data: first\n\n"
        stub.goes_on.clear()
    async with asyncio.timeout(30), client.post(PATH, data=b"{}") as response:
        assert await response.content.readany() == b"data: first\n\n"
        last, other = sorted(stubs, key=lambda stub: not stub.seen)
        await other.end()
        # It finds out that the other has ended.
        async with client.post(PATH, data=b"{}") as second:
            assert await second.content.readany() == b"data: first\n\n"
            assert (len(last.seen), len(other.seen)) == (2, 0)
            await last.end()
            with pytest.raises(aiohttp.ClientError):
                await response.read()


async def test_without_a_replica_the_client_is_told_to_come_again(
    stubs: list[Stub], client: aiohttp.ClientSession
) -> None:
    for stub in stubs:
        await stub.end()
    async with client.post(PATH, data=b"{}") as response:
        answer: dict[str, Any] = await response.json()
        assert (response.status, response.headers["Retry-After"]) == (503, "5")
    assert "no replica answers" in answer["error"]["message"]

"""The HTTP server and our own routes, over a real socket, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI

from gradus.errors import DeadlineError, ProcessError
from gradus.inference.admin import PolicyRoutes, WeightAdmin
from gradus.inference.guard import Guard, Tokens
from gradus.inference.http_server import Stop, build_http_server, serve_until_stopped, warm_up
from gradus.processes.listening import bind
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Status, Stuck
from gradus.wire.inference import EngineStatus, ServedPolicy

DATA, ADMIN = "d" * 64, "a" * 64


class FakeEngine:
    """Answers what the routes ask, and takes part in a change without doing anything."""

    def __init__(self) -> None:
        self.version = 0

    async def get_weight_version(self) -> str:
        return str(self.version)

    async def collective_rpc(self, method: str) -> list[Any]:
        return [{"asked": method}]

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def set_version(self, version: int) -> None:
        self.version = version

    async def get_version(self) -> int:
        return self.version


class FakeCounters:
    def status(self, *, version: int, term: int, is_paused: bool) -> EngineStatus:
        return EngineStatus(version, term, 2, 1, 0.25, 0, 30, 40, is_paused)


def build_app(weights: Path, *, is_paused: bool = False) -> Guard:
    app, engine = FastAPI(), FakeEngine()
    admin = WeightAdmin(
        engine,
        served=ServedPolicy(run_id="demo", term=1, version=0, digest=None),
        initial_weights=None,
        weights_root=weights,
        verify=lambda directory, digest: None,
        on_broken=lambda reason: None,
    )
    admin.is_paused = is_paused
    PolicyRoutes(engine, admin, FakeCounters()).add_to(app)
    return Guard(app, Tokens.of(data=DATA, admin=ADMIN))


async def serve(
    app: Any, talk: Callable[[aiohttp.ClientSession], Awaitable[None]], *, stop: Stop | None = None
) -> None:
    """Serve `app` while `talk` runs as its first client."""
    stop = stop or Stop()

    async def when_listening(base_url: str) -> None:
        async with aiohttp.ClientSession(base_url) as session:
            await talk(session)
        stop.ask()

    with bind("127.0.0.1", 0, allow_public_bind=False) as listener:
        server = build_http_server(app)
        await serve_until_stopped(server, listener, stop=stop, when_listening=when_listening)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_status_tells_the_engines_version_and_its_load(tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        async with session.get("/gradus/status", headers=bearer(DATA)) as response:
            status = await response.json()
        assert (status["version"], status["term"], status["running"]) == (0, 1, 2)
        assert (status["kv_usage"], status["generated_tokens"]) == (0.25, 40)

    await serve(build_app(tmp_path), talk)


async def test_apply_changes_the_version_and_refusals_carry_their_status(tmp_path: Path) -> None:
    directory = tmp_path / "version_1"
    body = {"run_id": "demo", "term": 1, "version": 1, "directory": str(directory), "digest": "x"}

    async def talk(session: aiohttp.ClientSession) -> None:
        async def apply(**changes: Any) -> tuple[int, Any]:
            asked = {"json": body | changes, "headers": bearer(ADMIN)}
            async with session.post("/gradus/apply", **asked) as response:
                return response.status, await response.json()

        assert (await apply())[1]["version"] == 1
        assert (await apply(term=0))[0] == 409
        code, answer = await apply(directory="/etc")
        assert (code, answer["error"]["code"]) == (403, 403)
        assert (await apply(unknown=1))[0] == 400

    await serve(build_app(tmp_path), talk)


async def test_served_weights_are_told_with_their_version(tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        async with session.get("/gradus/weights", headers=bearer(ADMIN)) as response:
            answer = await response.json()
        assert answer == {"version": 0, "workers": [{"asked": "gradus_served_tensors"}]}

    await serve(build_app(tmp_path), talk)


async def test_weights_that_change_or_sleep_are_not_read(tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        async with session.get("/gradus/weights", headers=bearer(ADMIN)) as response:
            assert response.status == 409
            assert "changing or asleep" in (await response.json())["error"]["message"]

    await serve(build_app(tmp_path, is_paused=True), talk)


async def test_closed_routes_stay_closed_over_a_real_socket(tmp_path: Path) -> None:
    async def talk(session: aiohttp.ClientSession) -> None:
        for path in ("/docs", "/openapi.json", "/gradus/status"):
            async with session.get(path) as response:
                assert response.status == 401

    await serve(build_app(tmp_path), talk)


async def test_sigterm_ends_the_server_without_an_error(tmp_path: Path) -> None:
    async def talk(_: aiohttp.ClientSession) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        await serve(build_app(tmp_path), talk)


async def test_the_first_reason_to_end_is_the_one_that_is_raised(tmp_path: Path) -> None:
    stop = Stop()

    async def talk(_: aiohttp.ClientSession) -> None:
        stop.fail(ProcessError("the engine ended"))
        stop.fail(ProcessError("and so did something else"))

    with pytest.raises(ProcessError, match="the engine ended"):
        await serve(build_app(tmp_path), talk, stop=stop)


async def test_a_server_that_cannot_become_ready_ends_with_the_cause(tmp_path: Path) -> None:
    async def talk(_: aiohttp.ClientSession) -> None:
        raise DeadlineError("no answer")

    with pytest.raises(DeadlineError, match="no answer"):
        await serve(build_app(tmp_path), talk)


async def test_an_unexpected_failure_while_becoming_ready_is_not_lost(tmp_path: Path) -> None:
    async def talk(_: aiohttp.ClientSession) -> None:
        raise KeyError("surprise")

    with pytest.raises(ProcessError, match="surprise"):
        await serve(build_app(tmp_path), talk)


async def test_warm_up_sends_real_generate_requests() -> None:
    async with ScriptedEngine(data_token=DATA) as engine:
        await warm_up(engine.base_url, DATA, timeout_seconds=5)
        assert {call.status for call in engine.calls} == {200}
        assert engine.calls[0].sampling_params["max_tokens"] == 1


async def test_warm_up_names_an_engine_that_never_answers() -> None:
    async with ScriptedEngine(data_token=DATA) as engine:
        engine.inject(Stuck())
        with pytest.raises(DeadlineError, match=engine.base_url):
            await warm_up(engine.base_url, DATA, timeout_seconds=0.05)


async def test_warm_up_tells_what_the_engine_refused() -> None:
    async with ScriptedEngine(data_token=DATA) as engine:
        engine.inject(Status(500))
        with pytest.raises(ProcessError, match="500"):
            await warm_up(engine.base_url, DATA, timeout_seconds=5)

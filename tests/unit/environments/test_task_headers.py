"""A task's headers reach the endpoint of another with its requests, and nothing else does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from aiohttp import web
from echo_tasksets import EchoConfig, EchoTaskset
from verifiers.v1.errors import TaskError
from verifiers.v1.interception.server import InterceptionServer

from gradus.config import EnvironmentProcessConfig
from gradus.environments.process import check_headers
from gradus.environments.tasks import TaskIndex
from gradus.environments.verifiers.task_headers import (
    MAX_CHARACTERS,
    headers_of,
    send_task_headers,
)
from gradus.errors import ConfigError
from gradus.testing.engine_script import chat_body


class RoutedData(vf.TaskData):
    """Data with headers, right or wrong."""

    routing: Any = None


class Routed(vf.Task[RoutedData, vf.State, vf.TaskConfig]):
    """A conversation that the user opens."""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(InterceptionServer, "register", InterceptionServer.register)
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("THEIR_KEY", "their-key")
    send_task_headers("routing")
    send_task_headers("routing")


@asynccontextmanager
async def endpoint(seen: list[Any]) -> AsyncIterator[str]:
    """A model of others that notes the headers of each request."""

    async def chat(request: web.BaseRequest) -> web.Response:
        seen.append(request.headers)
        return web.Response(body=chat_body("fine"), content_type="application/json")

    runner = web.ServerRunner(web.Server(chat))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def play(*all_routing: object) -> tuple[list[vf.Trace], list[Any]]:
    """The traces of one turn for each task, all with one agent, and the headers that came."""
    seen: list[Any] = []
    traces = []
    async with endpoint(seen) as base_url:
        config = vf.AgentConfig(
            harness={"id": "gradus-chat"},
            runtime={"type": "subprocess"},
            model="theirs",
            client=vf.EvalClientConfig(base_url=base_url, api_key_var="THEIR_KEY"),
        )
        async with vf.make_agent(config) as agent:
            for routing in all_routing:
                async with agent.interaction(Routed(RoutedData(routing=routing))) as talk:
                    await talk.turn("hello")
                traces.append(talk.trace)
    return traces, seen


async def test_each_episode_sends_those_of_its_own_task_and_the_key_stays() -> None:
    traces, seen = await play({"X-Route": "a", "x-user": "7"}, None, {"x-route": "b"})
    assert [trace.errors for trace in traces] == [[], [], []]
    assert [headers.get("X-Route") for headers in seen] == ["a", None, "b"]
    assert [headers.get("X-User") for headers in seen] == ["7", None, None]
    assert {headers["Authorization"] for headers in seen} == {"Bearer their-key"}


async def test_headers_that_cannot_be_sent_fail_the_episode_under_their_name() -> None:
    with pytest.raises(TaskError, match="headers_from: routing holds 'Authorization', which a"):
        await play({"Authorization": "Bearer mine"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x-route: a", "must be a table of names and values, not str"),
        ({"x route": "a"}, "'x route', which is not a name of a header"),
        ({"": "a"}, "not a name of a header"),
        ({7: "a"}, "not a name of a header"),
        ({"x-route\r\nx-other": "a"}, "not a name of a header"),
        ({"x-route": "a\r\nx-other: b"}, "routing.x-route must be text in ASCII without control"),
        ({"x-route": "a\0"}, "without control characters"),
        ({"x-route": "\udcff"}, "must be text in ASCII"),
        ({"x-route": 7}, "must be text in ASCII"),
        ({"x-route": "a", "X-Route": "b"}, "holds a name twice"),
        ({"x-route": "a" * MAX_CHARACTERS}, "more than 4096 characters"),
        *(({name: "a"}, "a task may not set") for name in ("AUTHORIZATION", "Host", "Cookie")),
    ],
)
def test_wrong_headers_are_refused_without_their_value(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        headers_of({"routing": given}, "routing")
    assert "aaaa" not in str(caught.value)


def config_of(headers_from: str | None) -> EnvironmentProcessConfig:
    return EnvironmentProcessConfig(
        run_dir="run",
        term=1,
        name="game",
        verifiers={},
        headers_from=headers_from,
    )


async def test_a_field_that_the_tasks_lack_is_refused_at_the_start() -> None:
    tasks = TaskIndex(EchoTaskset(EchoConfig(id="echo", num_tasks=2)))
    await check_headers(config_of(None), tasks)
    for field, said in (("routing", "has no field 'routing'"), ("answer", "not str")):
        with pytest.raises(ConfigError, match=f"source 'game': headers_from .*{said}"):
            await check_headers(config_of(field), tasks)

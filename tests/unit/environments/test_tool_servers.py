"""A tool server that cannot start is told soon, and not too many run at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import wait_until_async
from pydantic import BaseModel
from verifiers.v1 import env, rollout
from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import provision_runtime
from verifiers.v1.runtimes.subprocess import SubprocessConfig

from gradus.environments.verifiers import tool_servers
from gradus.environments.verifiers.tool_servers import (
    SharedToolServers,
    ToolServerLimits,
    ToolServerSlots,
    read_port,
    serve_within,
)


class Settings(BaseModel):
    """None."""


class Server:
    """What verifiers needs of a tool server that it starts as `python -m <its module>`."""

    server_name = "calculator"
    config = Settings()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_read_back_port", launch._read_back_port)
    monkeypatch.setattr(launch, "serve_in_runtime", launch.serve_in_runtime)
    monkeypatch.setattr(rollout, "serve_tools", rollout.serve_tools)
    monkeypatch.setattr(env, "serve_shared", env.serve_shared)
    tool_servers.bound_tool_servers(ToolServerLimits())


@pytest.mark.usefixtures("patched")
async def test_a_server_that_ends_at_its_start_fails_at_once_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Server, "__module__", "gradus_test_no_such_server")
    async with provision_runtime(SubprocessConfig()) as runtime, asyncio.timeout(60):
        with pytest.raises(ToolsetError) as caught:
            await launch.serve_in_runtime(Server(), runtime, exposed=False)  # type: ignore[arg-type]
    first = str(caught.value).splitlines()[0]
    assert first.startswith("tool server 'calculator' did not start: ")
    assert "No module named" in first


async def children_reaped() -> None:
    """Returns once asyncio has heard of the end of each child; verifiers kills and forgets some."""
    await wait_until_async(
        lambda: (
            not any(
                issubclass(type(found), BaseSubprocessTransport) and not found._closed  # type: ignore[attr-defined]
                for found in gc.get_objects()
            )
        ),
        what="the end of every child",
    )


class Unnamed(Server):
    """A server of a toolset whose tools have no prefix."""

    server_name = ""


@pytest.mark.usefixtures("patched")
async def test_a_server_that_ends_once_it_has_named_its_port_is_told_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """verifiers would ask the port for three minutes."""
    (tmp_path / "gradus_test_ends.py").write_text(
        "import os, sys, time\n"
        "open(os.environ['MCP_PORT_FILE'], 'w').write('1')\n"
        "time.sleep(0.5)\n"
        "raise FileNotFoundError('no pages')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Unnamed, "__module__", "gradus_test_ends")
    async with provision_runtime(SubprocessConfig()) as runtime, asyncio.timeout(60):
        with pytest.raises(ToolsetError) as caught:
            await launch.serve_in_runtime(Unnamed(), runtime, exposed=False)  # type: ignore[arg-type]
    await children_reaped()
    first = str(caught.value).splitlines()[0]
    assert first == "tool server 'Unnamed' did not start: FileNotFoundError: no pages"


@pytest.mark.usefixtures("patched")
async def test_a_server_that_serves_in_no_time_is_told_with_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gradus_test_hangs.py").write_text(
        "import time\nprint('waiting for a key', flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Server, "__module__", "gradus_test_hangs")
    limited = tool_servers.start_in_time(
        launch.serve_in_runtime.__wrapped__, ToolServerLimits(start_seconds=3.0)
    )
    async with provision_runtime(SubprocessConfig()) as runtime, asyncio.timeout(60):
        with pytest.raises(ToolsetError, match=r"(?s)setup = 3 s.*waiting for a key"):
            await limited(Server(), runtime, exposed=False)
    await children_reaped()


async def test_a_server_that_never_names_its_port_ends_with_the_deadline() -> None:
    runtime = SimpleNamespace(type="subprocess", read=never_there)
    with pytest.raises(ToolsetError, match=r"it named no port within 0\.2 s"):
        await read_port(runtime, "absent", limits=ToolServerLimits(start_seconds=0.2))


async def never_there(path: str) -> bytes:
    raise FileNotFoundError(path)


@contextlib.asynccontextmanager
async def serve(toolsets: list[Any], *_: Any, **__: Any) -> AsyncIterator[dict[str, str]]:
    yield {str(number): "http://127.0.0.1:1" for number in range(len(toolsets))}


def toolset(url: str | None = None) -> Any:
    return SimpleNamespace(config=SimpleNamespace(url=url))


async def test_episodes_wait_for_room_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = ToolServerSlots(ToolServerLimits(start_seconds=20.0, max_at_once=2))
    serve_bounded = serve_within(serve, slots)
    most = 0

    async def play() -> None:
        nonlocal most
        async with serve_bounded([toolset(), toolset("http://there")]) as urls:
            assert len(urls) == 2
            most = max(most, slots.running)
            await asyncio.sleep(0)

    await asyncio.gather(*(play() for _ in range(7)))
    assert most == 2
    assert slots.running == 0
    assert len([r for r in caplog.records if "max_tool_servers" in r.message]) == 1


async def test_agents_of_one_episode_do_not_wait_for_each_other_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = ToolServerSlots(ToolServerLimits(start_seconds=0.1, max_at_once=1))
    async with asyncio.timeout(60), slots.hold(1), slots.hold(1):
        assert slots.running == 2
    assert "continuing with 2 at once" in caplog.text


async def test_servers_that_run_elsewhere_take_no_room() -> None:
    slots = ToolServerSlots(ToolServerLimits(max_at_once=1))
    async with serve_within(serve, slots)([toolset("http://there")]):
        assert slots.running == 0


class Shared:
    """A shared server of this machine that has ended, or not."""

    def __init__(self, url: str, *, exit_code: int | None) -> None:
        self.url = url
        self.state_secret = ""
        process = SimpleNamespace(returncode=exit_code)
        info = SimpleNamespace(id=None)
        self.runtime = SimpleNamespace(type="subprocess", _background=[process], info=info)


async def test_a_shared_server_that_ended_is_replaced_once_for_all_episodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[Shared] = []
    exit_codes = iter([-9, None])

    @contextlib.asynccontextmanager
    async def serve_shared(toolsets: list[Any]) -> AsyncIterator[dict[str, Any]]:
        started.append(Shared(f"http://{len(started)}", exit_code=next(exit_codes)))
        yield {toolset.server_name: started[-1] for toolset in toolsets}

    shared = SharedToolServers(serve_shared)
    async with shared.serve([Server()]) as servers:
        seen = [dict(servers) for _ in range(5)]
        found = await asyncio.gather(*(shared.alive(entry) for entry in seen))
        assert servers["calculator"] is started[1]
    assert [entry["calculator"].url for entry in found] == ["http://1"] * 5
    assert len(started) == 2
    assert "ended with exit code -9" in caplog.text


async def test_a_remote_server_has_no_deadline_of_ours() -> None:
    async def times_out(*_: Any, **__: Any) -> int:
        raise TimeoutError

    start = tool_servers.start_in_time(times_out, ToolServerLimits())
    with pytest.raises(TimeoutError):
        await start(Server(), SimpleNamespace(type="docker"))

"""An environment's socket answers what it can and survives what it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgpack
import pytest
import verifiers.v1 as vf
from running import exchange

from gradus.environments.process import EnvironmentServer
from gradus.environments.verifiers.exits import drop_unreadable_requests
from gradus.errors import EnvironmentFailure


class FakeTaskset:
    @staticmethod
    def task_type() -> Any:
        return SimpleNamespace(data_type=lambda: vf.TaskData)


class FakeEnvironment:
    config = SimpleNamespace(taskset=SimpleNamespace(id="fake"))
    taskset = FakeTaskset()

    def serving(self) -> Any:
        return nullcontext()


class FakeTasks:
    """Three tasks; the fourth cannot be loaded."""

    taskset_id = "fake"
    num_tasks = 3
    agents: ClassVar[dict[str, bool]] = {"agent": True}
    offers_tools = False

    async def task(self, index: int) -> dict[str, Any]:
        if index == 2:
            await asyncio.Event().wait()
        if index == 3:
            raise KeyError("row 3 is corrupt")
        if index == 4:
            return {"task_data": {"prompt": "\ud800"}, "key": "k"}
        if not 0 <= index < 3:
            raise EnvironmentFailure(f"taskset 'fake' has no task {index}")
        return {"task_data": {"prompt": f"text {index}"}, "key": f"key {index}"}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    drop_unreadable_requests()
    environment: Any = FakeEnvironment()
    tasks: Any = FakeTasks()
    server = EnvironmentServer(environment, tasks, f"ipc://{folder / 's'}")
    try:
        await server.answers()
        yield server.address
        assert not server.serving.done()
    finally:
        await server.close()


async def ask(address: str, method: str, **request: Any) -> dict[str, Any]:
    name, kind, data = await exchange(address, [b"7", method.encode(), msgpack.packb(request)])
    assert (name, kind) == (b"7", b"reply")
    reply: dict[str, Any] = msgpack.unpackb(data)
    return reply


async def test_health_is_answered_while_a_task_is_being_made(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        slow = asyncio.create_task(ask(address, "task", index=2))
        first = asyncio.create_task(ask(address, "task", index=0))
        async with asyncio.timeout(10):
            assert (await first)["success"]
            assert (await ask(address, "health"))["success"]
        assert not slow.done()
        slow.cancel()


async def test_what_it_offers_and_its_tasks_are_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        told = await ask(address, "info")
        assert (told["num_tasks"], told["taskset"]) == (3, "fake")
        assert (told["agents"], told["tools"]) == ({"agent": True}, False)
        task = await ask(address, "task", index=1)
        assert (task["task_data"], task["key"]) == ({"prompt": "text 1"}, "key 1")


@pytest.mark.shows("F54")
@pytest.mark.parametrize(
    ("method", "request_fields", "complaint"),
    [
        ("task", {"index": 9}, "has no task 9"),
        ("task", {"index": 3}, "KeyError: 'row 3 is corrupt'"),
        ("task", {"index": 4}, "surrogates not allowed"),
        ("task", {}, "index"),
        ("task", {"index": "one"}, "index"),
        ("play", {}, "unknown method"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_with_the_reason(
    tmp_path: Path, method: str, request_fields: dict[str, Any], complaint: str
) -> None:
    async with serving(tmp_path) as address:
        reply = await ask(address, method, **request_fields)
        assert not reply["success"]
        assert complaint in reply["error"]


@pytest.mark.shows("F54")
@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x81\xa6method"],
)
async def test_a_malformed_payload_is_answered(tmp_path: Path, payload: bytes) -> None:
    async with serving(tmp_path) as address:
        frames = await exchange(address, [b"id", b"task", payload])
        assert not msgpack.unpackb(frames[-1])["success"]
        assert (await ask(address, "info"))["success"]


@pytest.mark.shows("F54", "SEC8")
@pytest.mark.parametrize("frames", [[b"alone"], [b"\xff", b"info", b"\x80"], [b"1"] * 5])
async def test_a_message_of_another_shape_is_dropped(tmp_path: Path, frames: list[bytes]) -> None:
    async with serving(tmp_path) as address:
        with pytest.raises(TimeoutError):
            await exchange(address, frames, timeout_seconds=0.05)
        assert (await ask(address, "info"))["success"]


@pytest.mark.shows("F55")
async def test_a_peer_that_leaves_before_its_reply_does_no_harm(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await exchange(address, [b"1", b"info", b"\x80"], timeout_seconds=0.0)
        assert (await ask(address, "info"))["success"]

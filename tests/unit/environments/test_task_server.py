"""The task socket answers what it can and survives what it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from running import exchange

from gradus.environments.task_server import TaskServer
from gradus.errors import EnvironmentFailure
from gradus.wire.episode import Health


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
    health = Health(healthy=False, reason="worker process 7 was killed", num_workers=2)
    server = TaskServer(f"ipc://{folder / 's'}", FakeTasks(), lambda: health)
    task = asyncio.create_task(server.serve())
    try:
        yield server.address
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


async def ask(address: str, **request: Any) -> dict[str, Any]:
    frames = await exchange(address, [b"\xff\x00", msgspec.msgpack.encode(request)])
    assert frames[0] == b"\xff\x00"
    reply: dict[str, Any] = msgspec.msgpack.decode(frames[1])
    return reply


async def test_health_is_answered_while_a_task_is_being_made(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        slow = asyncio.create_task(ask(address, method="task", index=2))
        first = asyncio.create_task(ask(address, method="task", index=0))
        async with asyncio.timeout(10):
            assert (await first)["ok"]
            assert (await ask(address, method="health"))["ok"]
        assert not slow.done()
        slow.cancel()


async def test_the_three_methods_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        assert await ask(address, method="info") == {
            "ok": True,
            "result": {
                "num_tasks": 3,
                "taskset": "fake",
                "agents": {"agent": True},
                "tools": False,
            },
        }
        assert await ask(address, method="task", index=1) == {
            "ok": True,
            "result": {"task_data": {"prompt": "text 1"}, "key": "key 1"},
        }
        assert (await ask(address, method="health"))["result"] == {
            "healthy": False,
            "reason": "worker process 7 was killed",
            "num_workers": 2,
        }


@pytest.mark.shows("F54")
@pytest.mark.parametrize(
    ("request_fields", "complaint"),
    [
        ({"method": "task", "index": 9}, "has no task 9"),
        ({"method": "task", "index": 3}, "KeyError: 'row 3 is corrupt'"),
        ({"method": "task", "index": 4}, "surrogates not allowed"),
        ({"method": "task"}, "is not known; use one of info, task, health"),
        ({"method": "run"}, "is not known"),
        ({"method": "task", "index": "1"}, "Expected `int | null`"),
        ({"method": "task", "index": True}, "Expected `int | null`"),
        ({"method": "info", "more": 1}, "unknown field `more`"),
        ({}, "missing required field `method`"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_with_the_reason(
    tmp_path: Path, request_fields: dict[str, Any], complaint: str
) -> None:
    async with serving(tmp_path) as address:
        reply = await ask(address, **request_fields)
        assert not reply["ok"]
        assert complaint in reply["error"]


@pytest.mark.shows("F54")
@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x81\xa6method"],
)
async def test_a_malformed_payload_is_answered(tmp_path: Path, payload: bytes) -> None:
    async with serving(tmp_path) as address:
        frames = await exchange(address, [b"id", payload])
        assert not msgspec.msgpack.decode(frames[1])["ok"]
        assert (await ask(address, method="info"))["ok"]


@pytest.mark.shows("F54", "SEC8")
@pytest.mark.parametrize("frames", [[b"alone"], [b"1", b"2", b"3", b"4"], [b"1", b"x" * 70_000]])
async def test_a_message_of_another_shape_is_dropped(tmp_path: Path, frames: list[bytes]) -> None:
    async with serving(tmp_path) as address:
        with pytest.raises(TimeoutError):
            await exchange(address, frames, timeout_seconds=0.05)
        assert (await ask(address, method="info"))["ok"]


@pytest.mark.shows("F55")
async def test_a_peer_that_leaves_before_its_reply_does_no_harm(tmp_path: Path) -> None:
    async with serving(tmp_path) as address:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await exchange(address, [b"1", b"\x81\xa6method\xa4info"], timeout_seconds=0.0)
        assert (await ask(address, method="info"))["ok"]

"""The task socket: an environment's tasks by index; verifiers' own socket plays them.

Protocol: the client's DEALER sends `[request id, payload]` and receives `[request id, payload]`;
the id is any bytes that the client chose, both payloads are msgpack maps.

    request   {"method": "info"}
              {"method": "task", "index": 3}
              {"method": "health"}
    reply     {"ok": true, "result": {...}}
              {"ok": false, "error": "what is wrong and what to do"}

Results: `info` a `TaskSetInfo`, `task` {"task_data": {...}, "key": str}, `health` a `Health`.

A message that is none of these is answered with an error where it can be, and never ends the
socket. `REQUEST_METHODS` lists the methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gradus.environments.tasks import TaskIndex
from gradus.errors import GradusError
from gradus.log import get_logger
from gradus.wire.episode import Health, TaskRequest, TaskSetInfo

REQUEST_METHODS = ("info", "task", "health")
MAX_REQUEST_BYTES = 64 * 1024
"""Longer messages are dropped by the socket and their connection closed."""

log = get_logger(__name__)


class TaskServer:
    """Answers requests on the task socket until it is cancelled."""

    def __init__(self, address: str, tasks: TaskIndex, health: Callable[[], Health]) -> None:
        self._tasks = tasks
        self._health = health
        self._num_dropped = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def serve(self) -> None:
        """Answer requests, none of which waits for a task that another one asks for.

        consumes: requests        waits for: the next message
        produces: replies         unblocked by: the orchestrator
        """
        async with asyncio.TaskGroup() as group:
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) == 3:
                    group.create_task(self._reply(*frames))
                    continue
                self._num_dropped += 1
                if self._num_dropped.bit_count() == 1:
                    log.warning("task socket: dropped %d messages so far", self._num_dropped)

    async def _reply(self, identity: bytes, request_id: bytes, payload: bytes) -> None:
        reply = await self._answer(payload)
        # A peer that left, or that does not read its replies, loses them; ROUTER never blocks.
        await self._socket.send_multipart([identity, request_id, reply])

    async def _answer(self, payload: bytes) -> bytes:
        try:
            request = msgspec.msgpack.decode(payload, type=TaskRequest)
            result = await self._result(request)
            return msgspec.msgpack.encode({"ok": True, "result": result})
        except (GradusError, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            return _refusal(f"{error}")
        except Exception as error:  # a task that cannot be loaded fails its own request only
            log.exception("task socket: %s failed", type(error).__name__)
            return _refusal(f"{type(error).__name__}: {error}")

    async def _result(self, request: TaskRequest) -> Any:
        if request.method == "info":
            return TaskSetInfo(
                num_tasks=self._tasks.num_tasks,
                taskset=self._tasks.taskset_id,
                agents=dict(self._tasks.agents),
                tools=self._tasks.offers_tools,
            )
        if request.method == "health":
            return self._health()
        if request.method == "task" and request.index is not None:
            return await self._tasks.task(request.index)
        raise msgspec.ValidationError(
            f"method {request.method!r} with index {request.index!r} is not known; "
            f"use one of {', '.join(REQUEST_METHODS)}, with an index for `task` alone"
        )

    def close(self) -> None:
        """Close the socket; unsent replies are lost."""
        self._socket.close()
        self._context.term()


def _refusal(text: str) -> bytes:
    printable = text.encode("utf-8", errors="replace").decode()
    return msgspec.msgpack.encode({"ok": False, "error": printable})

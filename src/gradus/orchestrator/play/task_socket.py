"""The orchestrator's end of an environment's task socket: tasks by index, and health."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from gradus.errors import DeadlineError, EnvironmentFailure, ProtocolError
from gradus.log import get_logger
from gradus.orchestrator.types import Task
from gradus.wire.episode import Health, TaskRequest, TaskSetInfo

T = TypeVar("T")
MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Longer replies are refused by the socket; a task is not a data set."""

log = get_logger(__name__)


class _Refused(EnvironmentFailure):
    """The environment answered that it cannot do what was asked."""


class TaskRefused(EnvironmentFailure):
    """The environment lives and cannot give this one task."""


class _Reply(msgspec.Struct, frozen=True):
    ok: bool
    result: msgspec.Raw = msgspec.Raw()
    error: str = ""


class TaskClient:
    """Owns the connection to one task socket; requests may overlap."""

    def __init__(self, address: str, *, name: str, timeout_seconds: float = 60.0) -> None:
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        self._socket.connect(address)
        self._numbers = itertools.count()
        self._pending: dict[bytes, asyncio.Future[bytes]] = {}
        self._receiving = asyncio.create_task(self._receive())

    async def info(self) -> TaskSetInfo:
        return self._decode(await self._request(TaskRequest("info")), TaskSetInfo)

    async def task(self, index: int) -> Task:
        """One task; TaskRefused when the environment lives and cannot give it."""
        try:
            return self._decode(await self._request(TaskRequest("task", index)), Task)
        except DeadlineError as error:
            # Without an answer to this either, the environment hangs, not the task.
            await self.health()
            raise TaskRefused(f"{error}") from error
        except (_Refused, ProtocolError) as error:
            raise TaskRefused(f"{error}") from error

    async def health(self) -> Health:
        """Whether episodes can be played; DeadlineError when the process does not answer."""
        return self._decode(await self._request(TaskRequest("health")), Health)

    def fail_all(self, error: Exception) -> None:
        """End every pending request: no reply will come."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Close the connection; pending requests are cancelled."""
        self._receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiving
        for future in self._pending.values():
            future.cancel()
        self._socket.close()
        self._context.term()

    async def _request(self, request: TaskRequest) -> msgspec.Raw:
        request_id = str(next(self._numbers)).encode()
        future = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._socket.send_multipart([request_id, msgspec.msgpack.encode(request)])
                answer = await future
        except TimeoutError as error:
            raise DeadlineError(
                f"environment {self._name!r} did not answer {request.method!r} in "
                f"{self._timeout_seconds:g} s; see its log"
            ) from error
        finally:
            del self._pending[request_id]
        reply = self._decode(answer, _Reply)
        if not reply.ok:
            raise _Refused(f"environment {self._name!r}: {reply.error}")
        return reply.result

    async def _receive(self) -> None:
        """Hand each reply to its request.

        consumes: replies        waits for: the next one
        produces: answers        unblocked by: the environment process
        """
        while True:
            frames = await self._socket.recv_multipart()
            future = self._pending.get(frames[0]) if len(frames) == 2 else None
            if future is None:
                log.warning("environment %r: dropped an unexpected reply", self._name)
            elif not future.done():
                future.set_result(frames[1])

    def _decode(self, data: bytes | msgspec.Raw, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except ValueError as error:
            raise ProtocolError(
                f"environment {self._name!r} sent no valid {kind.__name__}: {error}"
            ) from error

"""Hands the episodes of one environment to worker processes, and asks each whether it lives.

It speaks the protocol of verifiers' `EnvServerPool`, whose workers it starts: a request is
`[id, method, payload]`, and what comes back `[id, kind, data]`, any number of `delta` and one
`reply`. verifiers' own never looks whether a worker is alive: one whose event loop is blocked, or
that is stopped, has the fewest requests soon, gets more, and finishes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from verifiers.v1.serve.types import CancelResponse, HealthResponse

from gradus.environments.pool import SILENT_SECONDS, PoolSize
from gradus.environments.worker import read_cause
from gradus.log import get_logger

ASK_SECONDS = 1.0
"""Between two questions to a worker that answered."""
START_SECONDS = 300.0
"""How long a new worker may take to load its environment."""
WATCH_INTERVAL_SECONDS = 0.25
END_SECONDS = 10.0
"""How long a worker may take to end before it is killed."""
FULL = 0.9
"""Share of the workers' places at which an elastic pool starts one more."""
_QUESTION = [b"gradus_alive", b"health", b"\xc0"]
_PARTS_OF_A_REQUEST = 4
_HEALTHY = msgspec.msgpack.encode(HealthResponse().model_dump(mode="json"))
_NOT_CANCELLED = msgspec.msgpack.encode(CancelResponse(cancelled=False).model_dump(mode="json"))

log = get_logger(__name__)

StartWorker = Callable[[str], tuple[BaseProcess, Connection]]
"""Starts a worker that serves an address; its process, and the pipe whose end ends it."""
Report = Callable[[dict[str, Any]], None]


class Worker:
    """One worker as its broker sees it."""

    def __init__(self, process: BaseProcess, death_pipe: Connection, socket: Any) -> None:
        self.process = process
        self.death_pipe = death_pipe
        self.socket = socket
        self.num_requests = 0
        """Those that it has not answered."""
        self.is_lost = False
        self._asked_at: float | None = None
        self._patience_seconds = START_SECONDS

    def heard(self) -> None:
        """It sent something, so its event loop runs."""
        self._asked_at = None
        self._patience_seconds = SILENT_SECONDS

    async def ask(self, now: float) -> None:
        """Ask for a sign of life, unless an answer is due already."""
        if self._asked_at is None:
            self._asked_at = now
            await self.socket.send_multipart(_QUESTION)

    def is_silent(self, now: float) -> bool:
        return self._asked_at is not None and now - self._asked_at > self._patience_seconds


class Broker:
    """Owns the workers of one environment and the socket at which their episodes are asked for.

    report: {"num_workers": n} and {"silent": [pid, ...]} when they changed, and
    {"lost": pid, "exit_code": n, "cause": text} for a worker that ended.
    """

    def __init__(
        self,
        address: str,
        size: PoolSize,
        folder: Path,
        *,
        start_worker: StartWorker,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds the address; the sockets of the workers lie in `folder`."""
        self.workers: list[Worker] = []
        self._size = size
        self._folder = folder
        self._start_worker = start_worker
        self._report = report
        self._clock = clock
        self._pending: dict[bytes, tuple[bytes, Worker]] = {}
        """Request → who asked, and who answers."""
        self._silent: list[int | None] = []
        self._context = zmq.asyncio.Context()
        self._clients = self._socket(zmq.ROUTER)
        self._clients.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._clients.bind(address)
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Serve until it is cancelled; then end the workers."""
        try:
            async with self._tasks:
                for _ in range(self._size.num_at_start):
                    self._add_worker()
                self._tasks.create_task(self._ask())
                self._tasks.create_task(self._watch())
                self._tasks.create_task(self._take())
        finally:
            self._close()

    async def _take(self) -> None:
        while True:
            parts = await self._clients.recv_multipart()
            if len(parts) == _PARTS_OF_A_REQUEST:
                await self._pass_on(*parts)
            else:
                log.warning("a request of %d parts is dropped", len(parts))

    async def _pass_on(self, client: bytes, request: bytes, method: bytes, payload: bytes) -> None:
        if method == b"health":
            await self._answer(client, [request, b"reply", _HEALTHY])
            return
        if method == b"cancel":
            worker = self._player_of(payload)
            if worker is None:
                await self._answer(client, [request, b"reply", _NOT_CANCELLED])
                return
        else:
            worker = self._freest()
        worker.num_requests += 1
        self._pending[request] = (client, worker)
        await worker.socket.send_multipart([request, method, payload])
        self._grow()

    def _freest(self) -> Worker:
        now = self._clock()
        return min(self.workers, key=lambda w: (w.is_lost, w.is_silent(now), w.num_requests))

    def _player_of(self, payload: bytes) -> Worker | None:
        """Who plays the episode that is to be cancelled; None when it is over."""
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            wanted = msgspec.msgpack.decode(payload, type=dict[str, Any]).get("request_id")
            _, worker = self._pending.get(str(wanted).encode(), (b"", None))
            return worker
        return None

    def _grow(self) -> None:
        """Start one more worker when all are nearly full, or none answers."""
        if not self._size.elastic or len(self.workers) == self._size.max_workers:
            return
        now = self._clock()
        places = len(self.workers) * self._size.multiplex
        if len(self._pending) >= FULL * places or all(w.is_silent(now) for w in self.workers):
            self._add_worker()

    async def _hand_back(self, worker: Worker) -> None:
        """Give what a worker sends to those who asked."""
        while True:
            request, kind, content = await worker.socket.recv_multipart(copy=False)
            worker.heard()
            client, _ = self._pending.get(request.bytes, (None, worker))
            if client is None:
                continue
            if kind.bytes == b"reply":
                del self._pending[request.bytes]
                worker.num_requests -= 1
            await self._answer(client, [request, kind, content])

    async def _answer(self, client: bytes, parts: list[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a client that is gone
            await self._clients.send_multipart([client, *parts], copy=False)

    async def _ask(self) -> None:
        while True:
            for worker in self.workers:
                await worker.ask(self._clock())
            await asyncio.sleep(ASK_SECONDS)

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)

    def _look(self) -> None:
        """Report which workers ended, or began or ceased to answer."""
        for worker in self.workers:
            if not worker.is_lost and worker.process.exitcode is not None:
                worker.is_lost = True
                pid, code = worker.process.pid, worker.process.exitcode
                cause = read_cause(self._folder, pid or 0)
                self._report({"lost": pid, "exit_code": code, "cause": cause})
        now = self._clock()
        silent = [w.process.pid for w in self.workers if w.is_silent(now)]
        if silent != self._silent:
            self._silent = silent
            self._report({"silent": silent})

    def _add_worker(self) -> None:
        address = f"ipc://{self._folder / str(len(self.workers))}"
        process, death_pipe = self._start_worker(address)
        socket = self._socket(zmq.DEALER)
        socket.connect(address)
        worker = Worker(process, death_pipe, socket)
        self.workers.append(worker)
        self._tasks.create_task(self._hand_back(worker))
        self._report({"num_workers": len(self.workers)})

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        return socket

    def _close(self) -> None:
        for worker in self.workers:
            worker.death_pipe.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(END_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
            worker.socket.close()
        self._clients.close()
        self._context.term()

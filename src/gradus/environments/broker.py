"""Hands the episodes of one environment to worker processes, and replaces those that are lost.

It speaks the protocol of verifiers' `EnvServerPool`, whose workers it starts: a request is
`[id, method, payload]`, and what comes back `[id, kind, data]`, any number of `delta` and one
`reply`. verifiers' own never looks whether a worker is alive: one whose event loop is blocked, or
that is stopped, has the fewest requests soon, gets more, and finishes none.

Each worker is asked for a sign of life. One that ended, that a signal stopped for
`STOPPED_SECONDS`, or that its own code blocked for longer than scoring may take, is lost: its
requests are refused as such and asked again, and a new worker takes its place.

An episode outlives the client that asked for it: another that asks for the same gets what was
played so far and what follows. So an orchestrator that is started anew loses no turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from verifiers.v1.serve.types import BaseResponse, CancelResponse, HealthResponse

from gradus.environments.pool import (
    LOAD_SECONDS,
    SILENT_SECONDS,
    STOPPED_SECONDS,
    PoolSize,
    describe_exit,
)
from gradus.environments.verifiers.exits import is_readable
from gradus.environments.worker import WORKER_VARIABLE, read_cause
from gradus.log import get_logger
from gradus.processes.table import (
    carries_mark,
    is_stopped,
    living_processes,
    memory_kills,
    resident_bytes,
    signal_process,
)
from gradus.wire.episode import ARE_YOU_THERE, FROM_OUTSIDE, LOST, NO_MEMORY, SETTLE_SECONDS

ASK_SECONDS = 1.0
"""Between two questions to a worker that answered."""
WATCH_INTERVAL_SECONDS = 0.25
STACKS_SECONDS = 1.0
"""How long before its end a blocked worker is asked to write its stacks into the log."""
REPLACED_PER_HOUR = 20
"""Workers that are lost after so many in an hour end the environment, as the last one did."""
END_SECONDS = 10.0
"""How long a worker may take to end before it is killed."""
FULL = 0.9
"""Share of the workers' places at which an elastic pool starts one more."""
ORPHANED_SECONDS = 180.0
"""How long an episode is kept for another client; a start of the orchestrator takes less."""
_QUESTION = [b"gradus_alive", b"health", b"\xc0"]
_GIVEN_UP = b"gradus_given_up"
_HOUR_SECONDS = 3600.0
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
        self.is_loading = True
        """Whether it has not answered anything yet."""
        self.is_lost = False
        self.resident_bytes = 0
        """What it held a second ago."""
        self.unanswered_seconds = 0.0
        """Of the broker's own life, which a pause of the whole run does not add to."""
        self.handing_back: asyncio.Task[None] | None = None
        self._asked_at: float | None = None

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def heard(self) -> None:
        """It sent something, so its event loop runs."""
        self._asked_at = None
        self.unanswered_seconds = 0.0
        self.is_loading = False

    def count_silence(self) -> None:
        """The broker looks, as it does at each interval."""
        if self._asked_at is not None:
            self.unanswered_seconds += WATCH_INTERVAL_SECONDS

    async def ask(self, now: float) -> None:
        """Ask for a sign of life, unless an answer is due already."""
        if self._asked_at is None and not self.is_lost:
            self._asked_at = now
            await self.socket.send_multipart(_QUESTION)

    def is_silent(self, now: float) -> bool:
        patience = LOAD_SECONDS if self.is_loading else SILENT_SECONDS
        return self._asked_at is not None and now - self._asked_at > patience


@dataclass
class _Asked:
    """A request that a worker has, and what it sent for it so far."""

    client: bytes
    name: bytes
    """Of the request, for this client."""
    worker: Worker
    method: bytes
    payload: bytes
    sent: list[tuple[zmq.Frame, zmq.Frame]] = field(default_factory=list)
    """Kind and content of each message, of an episode alone."""
    is_answered: bool = False
    orphaned_at: float | None = None
    """When the client was seen to be gone."""


class Broker:
    """Owns the workers of one environment and the socket at which their episodes are asked for.

    report: {"num_workers": n} and {"silent": [pid, ...]} when they changed, and
    {"lost": text, "pid": n, "is_replaced": bool} for a worker that was lost.
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
        self._pending: dict[bytes, _Asked] = {}
        """By the name that the worker knows."""
        self._players: set[bytes] = set()
        """Clients that asked for episodes."""
        self._silent: list[int] = []
        self._has_served = False
        self._memory_kills = memory_kills()
        self._num_started = 0
        self._num_dropped = 0
        self._replaced_at: deque[float] = deque()
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
            if is_readable(parts):
                await self._pass_on(*parts)
            else:
                self._num_dropped += 1
                if self._num_dropped.bit_count() == 1:
                    log.warning("%d requests that cannot be read were dropped", self._num_dropped)

    async def _pass_on(self, client: bytes, request: bytes, method: bytes, payload: bytes) -> None:
        if method == b"health":
            await self._answer(client, [request, b"reply", _HEALTHY])
            return
        if method == b"cancel":
            name = self._playing(client, payload)
            if name is None:
                await self._answer(client, [request, b"reply", _NOT_CANCELLED])
                return
            worker: Worker | None = self._pending[name].worker
            payload = _cancellation(name)
        else:
            await self._meet(client)
            if await self._adopt(client, request, payload):
                return
            worker = self._freest()
        if worker is None:
            await self._answer(client, [request, b"reply", _lost("no worker is left")])
            return
        worker.num_requests += 1
        self._pending[request] = _Asked(client, request, worker, method, payload)
        await worker.socket.send_multipart([request, method, payload])
        self._grow()

    async def _meet(self, client: bytes) -> None:
        """Look which of the others are gone when somebody new asks for an episode."""
        if client in self._players:
            return
        if self._players:
            await asyncio.sleep(SETTLE_SECONDS)
        for other in list(self._players):
            if not await self.is_there(other):
                self._players.remove(other)
                for asked in self._pending.values():
                    if asked.client == other and asked.orphaned_at is None:
                        asked.orphaned_at = self._clock()
        self._players.add(client)

    async def _adopt(self, client: bytes, request: bytes, payload: bytes) -> bool:
        """Whether an episode of a client that is gone is the one that this client asks for; it is
        this client's then, with all that was sent."""
        names = (
            name
            for name, it in self._pending.items()
            if it.orphaned_at is not None and it.payload == payload
        )
        if (name := next(names, None)) is None:
            return False
        asked = self._pending[name]
        log.info("an episode of a client that is gone goes on for another")
        asked.client, asked.name, asked.orphaned_at = client, request, None
        for kind, content in asked.sent:
            await self._answer(client, [request, kind, content])
        if asked.is_answered:
            del self._pending[name]
        return True

    async def _forget_orphans(self) -> None:
        since = self._clock() - ORPHANED_SECONDS
        for name, asked in list(self._pending.items()):
            if asked.orphaned_at is not None and asked.orphaned_at < since:
                del self._pending[name]
                if not asked.is_answered:
                    asked.worker.num_requests -= 1
                    await asked.worker.socket.send_multipart(
                        [_GIVEN_UP, b"cancel", _cancellation(name)]
                    )

    def _freest(self) -> Worker | None:
        """Who gets the next episode: one that still loads only if the others are full."""
        now = self._clock()

        def load(worker: Worker) -> tuple[bool, int]:
            places = self._size.multiplex if worker.is_loading else 0
            return worker.is_silent(now), worker.num_requests + places

        return min(self.workers, key=load, default=None)

    def _playing(self, client: bytes, payload: bytes) -> bytes | None:
        """The worker's name of the episode that a client cancels; None when it is over."""
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            wanted = str(msgspec.msgpack.decode(payload, type=dict[str, Any]).get("request_id"))
            for name, asked in self._pending.items():
                if asked.client == client and asked.name == wanted.encode():
                    return name
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
            self._has_served = True
            asked = self._pending.get(request.bytes)
            if asked is not None:
                await self._pass_back(request.bytes, asked, kind, content)

    async def _pass_back(
        self, name: bytes, asked: _Asked, kind: zmq.Frame, content: zmq.Frame
    ) -> None:
        if asked.method == b"run":
            asked.sent.append((kind, content))
        asked.is_answered = kind.bytes == b"reply"
        asked.worker.num_requests -= asked.is_answered
        is_sent = await self._answer(asked.client, [asked.name, kind, content])
        if not is_sent and asked.orphaned_at is None:
            asked.orphaned_at = self._clock()
        if asked.is_answered and is_sent:
            del self._pending[name]

    async def is_there(self, client: bytes) -> bool:
        return await self._answer(client, [*ARE_YOU_THERE])

    async def _answer(self, client: bytes, parts: list[Any]) -> bool:
        """False for a client that is gone."""
        try:
            await self._clients.send_multipart([client, *parts], copy=False)
        except zmq.ZMQError:
            return False
        return True

    async def _ask(self) -> None:
        while True:
            for worker in list(self.workers):
                worker.resident_bytes = resident_bytes(worker.pid) or worker.resident_bytes
                await worker.ask(self._clock())
            await asyncio.sleep(ASK_SECONDS)

    async def _watch(self) -> None:
        while True:
            for worker in list(self.workers):
                worker.count_silence()
                if (end := self._end_of(worker)) is not None:
                    await self._lose(worker, end)
            await self._forget_orphans()
            self._report_silent()
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)

    def _report_silent(self) -> None:
        now = self._clock()
        silent = [worker.pid for worker in self.workers if worker.is_silent(now)]
        if silent != self._silent:
            self._silent = silent
            self._report({"silent": silent})

    def _end_of(self, worker: Worker) -> str | None:
        """How a worker came to its end, or why it must; None for one that may go on."""
        code = worker.process.exitcode
        if code is not None:
            cause = read_cause(self._folder, worker.pid)
            outside = self._killed(worker) if code == -signal.SIGKILL else ""
            return f"{describe_exit(code)}{outside}{cause and f': {cause}'}"
        silence = worker.unanswered_seconds
        if silence >= STOPPED_SECONDS and is_stopped(worker.pid):
            return f"was stopped by a signal {FROM_OUTSIDE} for {silence:.0f} s"
        limit = self._size.load_seconds if worker.is_loading else self._size.blocked_seconds
        if silence >= limit - STACKS_SECONDS > silence - WATCH_INTERVAL_SECONDS:
            signal_process(worker.pid, signal.SIGUSR1)
        if silence < limit:
            return None
        if worker.is_loading:
            return f"did not load its environment within {limit:g} s (launch.ready_timeout_seconds)"
        return (
            f"answered nothing for {limit:g} s, the longest agent.timeout.scoring; a reward, tool "
            "or hook blocks it, the stacks above in its log say where"
        )

    def _killed(self, worker: Worker) -> str:
        """What is known of a kill that its own code did not ask for."""
        size = f"; it held {worker.resident_bytes / 2**30:.1f} GiB"
        before, self._memory_kills = self._memory_kills, memory_kills()
        if before is None or self._memory_kills is None or self._memory_kills <= before:
            return f", {FROM_OUTSIDE}{size}"
        return (
            f", {FROM_OUTSIDE}: {NO_MEMORY}{size}; let fewer episodes run at "
            "once, or give the job more memory"
        )

    async def _lose(self, worker: Worker, end: str) -> None:
        """Give up a worker and put another in its place; its episodes are to be asked for again."""
        worker.is_lost = True
        worker.process.kill()
        _end_programs_of(worker.pid)
        self.workers.remove(worker)
        if worker.handing_back is not None:
            worker.handing_back.cancel()
        worker.death_pipe.close()
        worker.socket.close()
        text = f"worker process {worker.pid} {end}"
        is_replaced = self._may_replace()
        self._report({"lost": text, "pid": worker.pid, "is_replaced": is_replaced})
        if is_replaced:
            self._add_worker()
        for name, asked in list(self._pending.items()):
            # What a worker has played to its end stays, whoever asks for it.
            if asked.worker is worker and not asked.is_answered:
                del self._pending[name]
                answer = _NOT_CANCELLED if asked.method == b"cancel" else _lost(text)
                await self._answer(asked.client, [asked.name, b"reply", answer])

    def _may_replace(self) -> bool:
        """Whether the environment can be loaded, and not too many were lost within an hour."""
        if not self._has_served:
            return False
        now = self._clock()
        while self._replaced_at and self._replaced_at[0] < now - _HOUR_SECONDS:
            self._replaced_at.popleft()
        self._replaced_at.append(now)
        return len(self._replaced_at) <= REPLACED_PER_HOUR

    def _add_worker(self) -> None:
        address = f"ipc://{self._folder / str(self._num_started)}"
        self._num_started += 1
        process, death_pipe = self._start_worker(address)
        socket = self._socket(zmq.DEALER)
        socket.connect(address)
        worker = Worker(process, death_pipe, socket)
        self.workers.append(worker)
        worker.handing_back = self._tasks.create_task(self._hand_back(worker))
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


def _cancellation(name: bytes) -> bytes:
    """What asks a worker to give an episode up."""
    return msgspec.msgpack.encode({"request_id": name.decode()})


def _lost(text: str) -> bytes:
    """The answer to a request whose worker is lost."""
    refusal = BaseResponse(success=False, error=f"{LOST}: {text}")
    return msgspec.msgpack.encode(refusal.model_dump(mode="json"))


def _end_programs_of(pid: int) -> None:
    """Kill what a worker started and left: programs, tool servers, and what those started."""
    for entry in living_processes():
        if carries_mark(entry.pid, WORKER_VARIABLE, f"{pid}"):
            signal_process(entry.pid, signal.SIGKILL)

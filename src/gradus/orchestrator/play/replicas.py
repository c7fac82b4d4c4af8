"""The policy behind several inference servers: all on one version, or out until they are.

A version goes live in two phases. Every replica reads and checks the weights first, and only then
all switch: weights that are damaged on disk are refused before any of them has changed. A replica
that fails in either phase, does not answer, or says that it serves another version is left out: the
run goes on with the others, and says so. It returns once it has applied the newest version.

Nobody has to tell the workers. A replica that serves an older version than the one with which an
episode began refuses its calls by itself (`gradus.wire.inference.behind`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gradus.errors import DeadlineError, FencedError, GradusError, ProcessError
from gradus.log import get_logger
from gradus.orchestrator.play.inference_client import (
    COUNTERS,
    AppliedPolicy,
    InferenceClient,
    PolicyClient,
)
from gradus.run.deadlines import APPLY_SECONDS
from gradus.run.paths import RunDirectory
from gradus.run.ready import wait_for_exit
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import EngineStatus, join_addresses

STATUS_SECONDS = 20.0
"""A replica that takes longer to say how it is doing is left out."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 5.0
"""Before a replica that is out is asked again, doubled each time."""
T = TypeVar("T")
log = get_logger(__name__)


@dataclass(eq=False)
class _Server:
    """One replica, as the orchestrator knows it."""

    name: str
    client: InferenceClient
    is_up: bool = True
    status: EngineStatus | None = None
    """With counters from the start of the run, however often the server started."""
    limits: set[asyncio.Timeout] = field(default_factory=set)
    """Of what is asked of it; they expire when it is left out."""
    watched_pid: int | None = None


async def connect_policy(
    run_dir: RunDirectory,
    processes: Sequence[str],
    *,
    term: int,
    tell: Callable[[str], None],
    start_seconds: float = 0.0,
) -> PolicyClient:
    """The client of a run's inference servers; `tell` gets a line when one leaves or returns.

    Those that start are awaited for `start_seconds`.
    """
    if len(processes) == 1:
        return await InferenceClient.connect(run_dir, term=term, start_seconds=start_seconds)
    async with AsyncExitStack() as stack:
        clients = {}
        for name in processes:
            # One that ends is left out, not awaited.
            clients[name] = await InferenceClient.connect(
                run_dir, term=term, process=name, away_seconds=0.0, start_seconds=start_seconds
            )
            stack.push_async_callback(clients[name].close)
        stack.pop_all()
        return PolicyReplicas(clients, tell=tell)


class PolicyReplicas:
    """Owns which replicas serve the live version; a `PolicyClient` of all of them.

    >>> policy = PolicyReplicas({"inference_0": first, "inference_1": second}, tell=print)
    ... # doctest: +SKIP
    """

    def __init__(
        self, clients: Mapping[str, InferenceClient], *, tell: Callable[[str], None]
    ) -> None:
        """Of versions that differ, as an orchestrator may find that takes the place of another, the
        newest counts; the first `apply` takes the others there."""
        self._servers = [_Server(name, client) for name, client in clients.items()]
        self.version = self.newest_version = max(it.version for it in clients.values())
        self.kv_capacity_tokens = sum(it.kv_capacity_tokens for it in clients.values())
        self._tell = tell
        self._last: PolicyPublished | None = None
        self._is_changing = False
        self._returned = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        for server in self._servers:
            self._watch(server)

    @property
    def base_url(self) -> str:
        """The addresses of all: a worker finds out which of them answer."""
        return join_addresses([it.client.base_url for it in self._servers])

    def addresses(self) -> list[str]:
        """Of those that serve the live version."""
        return [it.client.base_url for it in self._up()]

    async def status(self) -> EngineStatus:
        """Of all that answer: the oldest version, loads and counters together, the fullest cache.

        ProcessError when none does.
        """
        asked = self._up()
        found = await asyncio.gather(
            *(self._ask(it, it.client.status(), STATUS_SECONDS) for it in asked),
            return_exceptions=True,
        )
        for server, status in zip(asked, found, strict=True):
            if isinstance(status, EngineStatus):
                server.status = status
                is_old = status.is_stale or status.version < self.version
                if is_old and not self._is_changing:
                    text = f"it serves version {status.version}, and {self.version} is live"
                    if status.is_stale:
                        text = "it is a new server, which was not told yet what it serves"
                    self._leave_out(server, text)
            elif not isinstance(status, GradusError) or isinstance(status, FencedError):
                raise status
            # While weights are read, an engine may take longer.
            elif not self._is_changing:
                self._leave_out(server, str(status))
        parts = {it.name: it.status for it in self._up() if it.status is not None}
        if not parts:
            raise ProcessError(f"none of {len(self._servers)} replicas of the policy answers")
        return self._together(parts)

    async def apply(self, published: PolicyPublished) -> AppliedPolicy:
        """Let every replica check the version, then every one serve it; see the module.

        The errors are those of one server, where none is left that did it.
        """
        self.newest_version = max(self.newest_version, published.version)
        self._last, begun = published, time.monotonic()
        self._is_changing = True
        try:
            async with asyncio.timeout(APPLY_SECONDS):
                changed = await self._change(published)
        except TimeoutError as error:
            raise DeadlineError(
                f"no replica applied version {published.version} in {APPLY_SECONDS:g} s; "
                "logs/inference_*.log say why"
            ) from error
        finally:
            self._is_changing = False
        self.version = published.version
        for applied, server in changed:
            server.status = applied.status
        parts = {it.name: it.status for it in self._up() if it.status is not None}
        pause = max((applied.pause_seconds for applied, _ in changed), default=0.0)
        seconds = time.monotonic() - begun
        return AppliedPolicy(published.version, seconds, pause, self._together(parts))

    async def serve_initial(self) -> None:
        await self._each(self._up(), lambda client: client.serve_initial())
        async with self._returned:
            await self._returned.wait_for(self._up)

    async def serve_again(self) -> EngineStatus:
        """Each new server is told when it returns."""
        return await self.status()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.client.close()

    async def _change(self, published: PolicyPublished) -> list[tuple[AppliedPolicy, _Server]]:
        checked = await self._each(self._up(), lambda client: client.verify(published))
        changed = await self._each([it for _, it in checked], lambda it: it.apply(published))
        if not changed:
            async with self._returned:
                # It has applied what was published last.
                await self._returned.wait_for(self._up)
        return changed

    async def _each(
        self,
        servers: Sequence[_Server],
        ask: Callable[[InferenceClient], Coroutine[Any, Any, T]],
    ) -> list[tuple[T, _Server]]:
        """What each answered; those that failed are left out, unless all failed for a reason that
        lies in what was asked."""
        found = await asyncio.gather(
            *(self._ask(it, ask(it.client), None) for it in servers), return_exceptions=True
        )
        failed = [(it, why) for it, why in zip(servers, found, strict=True) if _is_error(why)]
        for _, error in failed:
            if not isinstance(error, GradusError) or isinstance(error, FencedError):
                raise error  # type: ignore[misc]
        lasting = [error for _, error in failed if not isinstance(error, ProcessError)]
        if len(lasting) == len(servers) and lasting:
            raise lasting[0]  # type: ignore[misc]
        for server, error in failed:
            self._leave_out(server, str(error))
        return [(it, at) for it, at in zip(found, servers, strict=True) if not _is_error(it)]  # type: ignore[misc]

    async def _ask(self, server: _Server, asking: Awaitable[T], seconds: float | None) -> T:
        """The answer; ProcessError when the server is left out before, or takes too long."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                server.limits.add(limit)
                return await asking
        except TimeoutError as error:
            raise ProcessError(f"inference at {server.client.base_url} does not answer") from error
        finally:
            server.limits.discard(limit)

    def _leave_out(self, server: _Server, reason: str) -> None:
        if not server.is_up:
            return
        server.is_up = False
        limits, server.limits = server.limits, set()
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())
        self._tell(f"{server.name} is left out, {self._count()}: {reason}")
        self._start(self._bring_back(server))

    def _watch(self, server: _Server) -> None:
        pid = server.client.server_pid()
        if pid is not None and pid != server.watched_pid:
            server.watched_pid = pid
            self._start(self._leave_out_at_exit(server, pid))

    async def _leave_out_at_exit(self, server: _Server, pid: int) -> None:
        """Its port outlives it: whoever asks there waits for the next process."""
        await wait_for_exit(pid)
        if server.watched_pid == pid:
            self._leave_out(server, "its process ended")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, server: _Server) -> None:
        """Let a replica apply the newest version once it answers, until it does."""
        delay = FIRST_DELAY_SECONDS
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            if server.client.server_pid() is None:
                continue
            try:
                status = await self._ask(server, server.client.status(), STATUS_SECONDS)
                while (last := self._last) is not None and status.version != last.version:
                    status = (await server.client.apply(last)).status
                if status.is_stale:
                    status = await server.client.serve_again()
            except GradusError as error:
                log.debug("%s is still out: %s", server.name, error)
                continue
            server.status = status
            server.is_up = True
            self._watch(server)
            self._tell(f"{server.name} serves version {status.version} again, {self._count()}")
            async with self._returned:
                self._returned.notify_all()
            return

    def _together(self, parts: Mapping[str, EngineStatus]) -> EngineStatus:
        each = list(parts.values())
        totals = [it.status for it in self._servers if it.status is not None]
        return EngineStatus(
            version=min(it.version for it in each),
            term=max(it.term for it in each),
            running=sum(it.running for it in each),
            waiting=sum(it.waiting for it in each),
            kv_usage=max(it.kv_usage for it in each),
            is_paused=any(it.is_paused for it in each),
            kv_capacity_tokens=sum(it.kv_capacity_tokens for it in each),
            parts=dict(parts),
            incarnation=" ".join(it.incarnation for it in totals),
            **{name: sum(getattr(it, name) for it in totals) for name in COUNTERS},
        )

    def _up(self) -> list[_Server]:
        return [it for it in self._servers if it.is_up]

    def _count(self) -> str:
        return f"{len(self._up())} of {len(self._servers)} replicas serve the policy"


def _is_error(found: object) -> bool:
    return isinstance(found, BaseException)

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
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gradus.errors import DeadlineError, FencedError, GradusError, ProcessError, ProtocolError
from gradus.files import write_atomically
from gradus.log import get_logger
from gradus.orchestrator.play.inference_client import (
    COUNTERS,
    AppliedPolicy,
    Elsewhere,
    EngineFailed,
    InferenceClient,
    NoServer,
    PolicyClient,
    UnknownToken,
)
from gradus.processes.secured import AUTHORITY_VARIABLE, why_unchecked
from gradus.run.deadlines import APPLY_SECONDS
from gradus.run.model_files import text_digests
from gradus.run.paths import RunDirectory
from gradus.run.ready import read_servers, started_replicas, wait_for_exit
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import FILE_SCHEME, EngineStatus, join_addresses

STATUS_SECONDS = 20.0
"""A replica that takes longer to say how it is doing is left out."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 5.0
"""Before a replica that is out is asked again, doubled each time."""
LOOK_SECONDS = 1.0
"""Between two looks into a file of addresses."""
JOIN_SECONDS = 10.0
"""How long the servers of such a file have to answer before the run goes on without them."""
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
    has_served: bool = True
    """Whether it served the policy before."""
    said: set[str] = field(default_factory=set)
    """Why it is out, as told to a person."""


async def connect_policy(
    run_dir: RunDirectory,
    processes: Sequence[str],
    *,
    term: int,
    tell: Callable[[str], None],
    start_seconds: float = 0.0,
) -> PolicyClient:
    """The client of the inference servers that a run starts; `tell` gets a line when one leaves or
    returns.

    Those that start are awaited for `start_seconds`.
    """
    if len(processes) == 1:
        return await InferenceClient.connect(run_dir, term=term, start_seconds=start_seconds)
    async with AsyncExitStack() as stack:
        clients = {}
        for name in started_replicas(run_dir, processes):
            # One that ends is left out, not awaited.
            clients[name] = await InferenceClient.connect(
                run_dir, term=term, process=name, away_seconds=0.0, start_seconds=start_seconds
            )
            stack.push_async_callback(clients[name].close)
        stack.pop_all()
        return PolicyReplicas(clients, tell=tell)


class PolicyReplicas:
    """Owns which replicas serve the live version; a `PolicyClient` of all of them."""

    noun = "replicas"
    apply_seconds: float | None = APPLY_SECONDS

    def __init__(
        self, clients: Mapping[str, InferenceClient], *, tell: Callable[[str], None]
    ) -> None:
        """Of versions that differ, as an orchestrator may find that takes the place of another, the
        newest counts; the first `apply` takes the others there."""
        self._servers = [_Server(name, client) for name, client in clients.items()]
        versions = [it.version for it in clients.values()]
        self.version = self.newest_version = max(versions, default=0)
        self.kv_capacity_tokens = sum(it.kv_capacity_tokens for it in clients.values())
        self._tell = tell
        self._last: PolicyPublished | None = None
        self._serves_initial = False
        self._departed = dict.fromkeys(COUNTERS, 0)
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
            async with asyncio.timeout(self.apply_seconds):
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
        self._serves_initial = True
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
        server.said.add(reason)
        self._tell(f"{server.name} is left out, {self._count()}: {reason}")
        self._start(self._bring_back(server))

    def _watch(self, server: _Server) -> None:
        pid = server.client.server_pid()
        # One on another node is left out when it does not answer.
        if pid and pid != server.watched_pid:
            server.watched_pid = pid
            self._start(self._leave_out_at_exit(server, pid))

    async def _leave_out_at_exit(self, server: _Server, pid: int) -> None:
        """Its port outlives it: whoever asks there waits for the next process."""
        await wait_for_exit(pid)
        if server.watched_pid == pid:
            self._leave_out(server, "its process ended")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _bring_back(self, server: _Server) -> None:
        """Let a replica apply the newest version once it answers, until it does."""
        delay = FIRST_DELAY_SECONDS
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            if server not in self._servers:
                return
            if server.client.is_away:
                continue
            try:
                status = await self._brought(server)
                if server not in self._servers:
                    return
            except GradusError as error:
                log.debug("%s is still out: %s", server.name, error)
                will_pass = isinstance(error, ProcessError | DeadlineError | EngineFailed)
                if not will_pass and str(error) not in server.said:
                    server.said.add(str(error))
                    self._tell(f"{server.name} stays out: {error}")
                continue
            server.status = status
            server.is_up = True
            self._watch(server)
            comes = "serves version {} again" if server.has_served else "joins at version {}"
            server.has_served = True
            self._note_up()
            self._tell(f"{server.name} {comes.format(status.version)}, {self._count()}")
            async with self._returned:
                self._returned.notify_all()
            return

    def _note_up(self) -> None:
        """A server serves the live version, for the first time or again."""

    async def _brought(self, server: _Server) -> EngineStatus:
        """What a server says once it serves the live version, told so in this term."""
        client = server.client
        status = await self._ask(server, client.status(), STATUS_SECONDS)
        last: PolicyPublished | None = None
        # Also one that is published meanwhile.
        while self._last is not None and last is not self._last:
            last = self._last
            if (status.version, status.term) != (last.version, last.term) or status.is_stale:
                status = (await client.apply(last)).status
        if last is None and self._serves_initial:
            await client.serve_initial()
            status = await client.status()
        if last is None and status.version != self.version:
            raise ProtocolError(
                f"it serves version {status.version}, and {self.version} is live; start it again"
            )
        if status.is_stale:
            raise ProcessError("there is nothing to serve yet")
        return status

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
            **{
                name: self._departed[name] + sum(getattr(it, name) for it in totals)
                for name in COUNTERS
            },
        )

    def _up(self) -> list[_Server]:
        return [it for it in self._servers if it.is_up]

    def _count(self) -> str:
        return f"{len(self._up())} of {len(self._servers)} {self.noun} serve the policy"


class PolicyPool(PolicyReplicas):
    """Owns which servers of a watched file serve the live version; others start and end them.

    A server joins once it says that it is of this run, and was told what to serve. One whose line
    goes is asked nothing more. A change of the file counts when two looks found the same, so that a
    half written one does not; a file that is gone or has a mistake leaves all as it was.
    """

    noun = "servers"
    apply_seconds = None

    def __init__(
        self,
        file: Path,
        run_dir: RunDirectory,
        *,
        term: int,
        model: str,
        tell: Callable[[str], None],
        tokenizer: str | None = None,
    ) -> None:
        super().__init__({}, tell=tell)
        self._file = file
        self._run_dir = run_dir
        self._model = model
        self._text_digests = text_digests(model, tokenizer)
        self._connect = partial(InferenceClient.connect, run_dir, term=term, away_seconds=0.0)
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._tried: set[str] = set()
        self._is_noted = False
        self._term = term
        self._taken = self._seen = self._read()

    async def begin(self) -> PolicyPool:
        """Return once each server of the file answered or had time to, and follow the file."""
        self._note_up()
        self._take_text(self._taken)
        deadline = time.monotonic() + JOIN_SECONDS
        while self._joining.keys() - self._tried and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        known = [it.client.known for it in self._servers]
        versions = [it.version for it in known if it.term == self._term]
        self.version = self.newest_version = max(versions, default=0)
        # Of one: the limit in flight follows their number.
        self.kv_capacity_tokens = max((it.kv_capacity_tokens for it in known), default=0)
        self._start(self._follow())
        if not known:
            self._say_none()
        return self

    @property
    def base_url(self) -> str:
        """A file that workers follow: addresses come and go."""
        return f"{FILE_SCHEME}{self._run_dir.servers.absolute()}"

    async def status(self) -> EngineStatus:
        """As that of replicas; NoServer while there is none."""
        if self._up():
            return await super().status()
        raise NoServer(f"no server of {self._file} serves the policy")

    async def serve_initial(self) -> None:
        """Each server is told when it joins."""
        self._serves_initial = True

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            found = await asyncio.to_thread(self._read)
            if found == self._seen and found != self._taken:
                self._taken = found
                self._take_text(found)
            self._seen = found
            if not self._is_noted:
                self._note_up()

    def _take_text(self, found: str | None) -> None:
        try:
            if found is None:
                raise ValueError("it cannot be read any more")
            is_checked = AUTHORITY_VARIABLE in os.environ
            self._take(read_servers(found, only_encrypted=is_checked))
        except ValueError as error:
            self._tell(f"{self._file}: {error}; the servers that are known stay")

    def _read(self) -> str | None:
        try:
            return self._file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def _take(self, addresses: Sequence[str]) -> None:
        """Ask these servers, and no others."""
        for address in self._joining.keys() - set(addresses):
            self._joining.pop(address).cancel()
            self._tried.discard(address)
            for server in [it for it in self._servers if it.name == address]:
                self._let_go(server)
        for address in addresses:
            if address not in self._joining:
                self._joining[address] = self._start(self._join(address))

    def _let_go(self, server: _Server) -> None:
        self._servers.remove(server)
        if server.status is not None:
            for name in COUNTERS:
                self._departed[name] += getattr(server.status, name)
        self._note_up()
        if server.has_served:
            self._tell(f"{server.name} leaves, {self._count()}")
        was_up, server.is_up = server.is_up, False
        if was_up:
            self._say_none()
        self._start(self._close_later(server.client))

    async def _close_later(self, client: InferenceClient) -> None:
        """What is asked of it at this moment is answered first."""
        try:
            await asyncio.sleep(APPLY_SECONDS)
        finally:
            await client.close()

    async def _join(self, address: str) -> None:
        """Ask a server until it is one of the run's, and has served the live version."""
        delay, said = FIRST_DELAY_SECONDS, set[str]()
        while (server := await self._found(address, said)) is None:
            self._tried.add(address)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        self._servers.append(server)
        self._tried.add(address)
        await self._bring_back(server)

    async def _found(self, address: str, said: set[str]) -> _Server | None:
        """The server at an address; None where it does not answer, or is refused."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                elsewhere = Elsewhere(address, self._model, self._text_digests)
                client = await self._connect(elsewhere=elsewhere)
        except (GradusError, TimeoutError) as error:
            text = _why_not(error, self._run_dir)
        else:
            one = client.known.incarnation
            same = [it.name for it in self._servers if it.client.known.incarnation == one]
            if not one or not same:
                return _Server(address, client, is_up=False, has_served=False)
            await client.close()
            text = f"it is the server at {same[0]}"
        if text not in said:
            said.add(text)
            self._tell(f"{address} does not join: {text}")
        return None

    def _leave_out(self, server: _Server, reason: str) -> None:
        was_up = server.is_up
        super()._leave_out(server, reason)
        if was_up:
            self._say_none()

    def _say_none(self) -> None:
        if not self._up():
            self._tell(f"the run waits for a server: none of {self._file} serves the policy")

    def _note_up(self) -> None:
        """Tell the workers whom to ask; they find out by themselves who answers."""
        listed = [it.name for it in self._servers if it.has_served]
        content = "".join(f"{it}\n" for it in listed).encode()
        self._is_noted = False
        try:
            write_atomically(self._run_dir.servers, content)
        except OSError as error:
            log.warning("%s is written once the disk takes it: %s", self._run_dir.servers, error)
        else:
            self._is_noted = True


def _why_not(error: BaseException, run_dir: RunDirectory) -> str:
    if isinstance(error, UnknownToken):
        config = run_dir.config / "server.json"
        return (
            "it does not know this run's token; start it where the run's folder is seen, with "
            f"gradus inference @ {config} --process NAME --inference.port PORT"
        )
    if isinstance(error, ProtocolError):
        return str(error)
    if text := why_unchecked(error):
        return text
    return "it does not answer yet; it is asked until it does"


def _is_error(found: object) -> bool:
    return isinstance(found, BaseException)

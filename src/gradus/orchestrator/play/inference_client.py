"""The policy as served: which version is live, and how a new one goes live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from gradus.errors import (
    CorruptStateError,
    DeadlineError,
    FencedError,
    ProcessError,
    ProtocolError,
)
from gradus.log import get_logger
from gradus.processes.secured import client_context
from gradus.run.deadlines import APPLY_SECONDS
from gradus.run.paths import RunDirectory
from gradus.run.ready import InferenceReady, read_ready, read_token
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import ApplyRequest, ApplyResult, EngineStatus, is_stale

T = TypeVar("T")
STATUS_TIMEOUT_SECONDS = 30.0
"""Deadline of one status request; even a paused or busy engine answers it."""


ASK_AGAIN_SECONDS = 10.0
"""How long a request is sent again whose connection broke. All of them may arrive twice: a version
is known by term, number and digest, and applied once."""
LEAVE_SECONDS = 10.0
"""How long a server that failed may take to end, before what it answered counts."""
LONGEST_START_SECONDS = 1800.0
COUNTERS = (
    *("preemptions", "prompt_tokens", "generated_tokens"),
    *("prefix_queries", "prefix_hits", "asked_again"),
)
"""Of a status; a new server counts them from zero."""
_LOOK_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_PROXY_STATUSES = (502, 503, 504)
_WATCH_SECONDS = 1.0
log = get_logger(__name__)


class EngineFailed(ProtocolError):
    """The server answers that its engine failed; it may end soon."""


class EngineUnreached(EngineFailed):
    """What stands before the server does not reach it."""


class ConnectionBroken(ProcessError):
    """The whole answer did not come; what was asked for may be done or not."""


class HalfAnswer(ProtocolError):
    """An answer is none of the kind that was asked for."""


@dataclass(frozen=True)
class AppliedPolicy:
    """A version went live."""

    version: int
    apply_seconds: float
    """From the request to the confirmed version."""
    pause_seconds: float
    """How long the engine was paused."""
    status: EngineStatus


class PolicyClient(Protocol):
    """What the orchestrator needs of inference."""

    version: int
    """The newest version that inference confirmed to serve."""
    newest_version: int
    """`version`, or the one that is being applied right now and may serve already."""
    kv_capacity_tokens: int
    """Tokens that the KV caches hold together; 0 when unknown."""

    @property
    def base_url(self) -> str:
        """Where episodes ask: one address, or those of all replicas with commas between them."""

    def addresses(self) -> list[str]:
        """Of the servers that serve the live version at this moment."""

    async def status(self) -> EngineStatus:
        """What the engine says about itself: version, load, counters."""

    async def apply(self, published: PolicyPublished) -> AppliedPolicy:
        """Serve a published version; returns when the engine itself says that it does."""

    async def serve_initial(self) -> None:
        """Serve the weights that the server was started with, where none were applied."""

    async def serve_again(self) -> EngineStatus:
        """Tell a new server, which answers nobody yet, to serve the version that was served."""

    async def close(self) -> None: ...


class UnknownToken(ProtocolError):
    """The server does not take the token of the run."""


class NoServer(ProcessError):
    """Others start the servers of the run, and none is there at this moment."""


@dataclass(frozen=True)
class Elsewhere:
    """A server that others started."""

    address: str
    model: str
    """That it must have been started with."""
    text_digests: Mapping[str, str] = field(default_factory=dict)
    """Those of the run's own files; a part that only one of both knows is not compared."""


@dataclass(frozen=True)
class _Run:
    """Whose server is asked."""

    run_dir: RunDirectory
    term: int
    process: str
    elsewhere: Elsewhere | None = None
    ask_again_seconds: float = 0.0

    def check(self, base_url: str, status: EngineStatus) -> None:
        """ProtocolError unless it is a server of this run."""
        name = self.run_dir.root.name
        if self.elsewhere is None:
            if status.run_id not in ("", name):
                raise ProtocolError(
                    f"{self.process} at {base_url} serves run {status.run_id!r}, not {name!r}; end "
                    "what took its port"
                )
            return
        if status.run_id != name:
            raise ProtocolError(f"it serves run {status.run_id!r}, and this is run {name!r}")
        if status.model != (model := self.elsewhere.model):
            raise ProtocolError(
                f"it was started with model {status.model!r}, and the run trains {model!r}"
            )
        own, theirs = self.elsewhere.text_digests, status.text_digests
        if other := [part for part in own if theirs.get(part, own[part]) != own[part]]:
            raise ProtocolError(
                f"its files of the model are not those of the run: another {', '.join(other)}; "
                "start it with a copy of them"
            )
        if status.term > self.term:
            raise ProtocolError(
                f"it serves term {status.term} of the run, and this is term {self.term}: the run "
                "was started again elsewhere"
            )

    def server_pid(self) -> int | None:
        """Of the server that is ready; None while none is, or where others started it."""
        if self.elsewhere is not None:
            return None
        with suppress(ProcessError):
            return read_ready(self.run_dir, self.process, InferenceReady).pid
        return None


class InferenceClient:
    """Owns the connection to the run's inference server and the live version."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        base_url: str,
        status: EngineStatus,
        run: _Run,
        apply_seconds: float,
        away_seconds: float,
    ) -> None:
        self.base_url = base_url
        self.version = status.version
        self.newest_version = status.version
        self.kv_capacity_tokens = status.kv_capacity_tokens
        self._session = session
        self._run = run
        self._apply_seconds = apply_seconds
        self._away_seconds = away_seconds
        self._pid = run.server_pid()
        # From now on: an orchestrator in place of another would count the work of both at once.
        self._counted = msgspec.structs.replace(status, **dict.fromkeys(COUNTERS, 0))
        self.known = status
        """What the server said last, as it said it."""
        self._asked: ApplyRequest | None = None  # what a new server must serve before it is open
        self._changing = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        run_dir: RunDirectory,
        *,
        term: int,
        apply_seconds: float = APPLY_SECONDS,
        process: str = "inference",
        away_seconds: float = LONGEST_START_SECONDS,
        start_seconds: float = 0.0,
        elsewhere: Elsewhere | None = None,
    ) -> InferenceClient:
        """The client of one inference server of the run; asks which version it serves.

        A server that ends is awaited for `away_seconds`: the launcher starts another one. One that
        starts is awaited for `start_seconds`; one of `elsewhere` is no process of this run.
        ProtocolError when the server at its address is that of another run.
        """
        again = min(ASK_AGAIN_SECONDS, away_seconds)  # one of several is left out at once
        run = _Run(run_dir, term, process, elsewhere, again)
        deadline = time.monotonic() + start_seconds
        while True:
            try:
                session, base_url, status = await _open(run)
                break
            except (DeadlineError, ProcessError, EngineFailed):
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_LOOK_SECONDS)
        return cls(
            session,
            base_url=base_url,
            status=status,
            run=run,
            apply_seconds=apply_seconds,
            away_seconds=away_seconds,
        )

    async def serve_initial(self) -> None:
        async with self._changing:
            if self.version == 0:
                self._asked = self._request(0, "", "")
                await self._serve(self._asked)

    async def apply(self, published: PolicyPublished) -> AppliedPolicy:
        """Ask for the version, then ask the engine which one it serves, and compare.

        A server that ends meanwhile is asked again once another is ready.

        DeadlineError after the deadline, FencedError when a newer term rules the engine,
        CorruptStateError when the weights are not those that the trainer wrote, ProtocolError when
        the engine refuses for another reason or serves another version than it was asked for.
        """
        self.newest_version = max(self.newest_version, published.version)
        begun = time.monotonic()
        async with self._changing:
            asked = self._request(published.version, published.directory, published.digest)
            result, status = await self._serve(asked)
            self._asked = asked
        self.version = published.version
        seconds = time.monotonic() - begun
        return AppliedPolicy(published.version, seconds, result.pause_seconds, status)

    async def verify(self, published: PolicyPublished) -> None:
        """Let the server read and check a version that it is about to serve; errors as `apply`."""
        asked = self._request(published.version, published.directory, published.digest)
        await self._post_apply(msgspec.structs.replace(asked, only_verifies=True))

    def addresses(self) -> list[str]:
        return [self.base_url]

    @property
    def is_away(self) -> bool:
        """Whether the run has no such process at this moment."""
        return self._run.elsewhere is None and self.server_pid() is None

    def server_pid(self) -> int | None:
        """Process of the server that is ready; None while none is."""
        return self._run.server_pid()

    async def serve_again(self) -> EngineStatus:
        """Tell a new server to serve the version that was served; errors as in `apply`."""
        async with self._changing:
            status = await self.status()
            if status.is_stale and self._asked is not None:
                log.warning("a new inference server serves version %d again", self.version)
                _, status = await self._serve(self._asked)
            return status

    def _request(self, version: int, directory: str, digest: str) -> ApplyRequest:
        run = self._run
        return ApplyRequest(run.run_dir.root.name, run.term, version, directory, digest)

    async def _serve(self, asked: ApplyRequest) -> tuple[ApplyResult, EngineStatus]:
        """What the server says about a version that it serves now."""
        while True:
            try:
                async with asyncio.timeout(self._apply_seconds):
                    result = await self._post_apply(asked)
                    status = await self.status()
                break
            except (TimeoutError, DeadlineError, ProcessError, EngineFailed) as error:
                if await self._is_replaced():
                    continue
                if not isinstance(error, TimeoutError):
                    raise
                raise DeadlineError(
                    f"inference at {self.base_url} did not apply version {asked.version} in "
                    f"{self._apply_seconds:g} s; logs/inference.log says why"
                ) from error
        if status.version != asked.version or result.version != asked.version:
            raise ProtocolError(
                f"inference serves version {status.version} after it was asked for "
                f"{asked.version}; its log says why"
            )
        self._pid = self._run.server_pid()
        return result, status

    async def _is_replaced(self) -> bool:
        """Whether another server is ready in the place of one that failed, after waiting for it."""
        begun = time.monotonic()
        while (pid := self._run.server_pid()) in (None, self._pid):
            limit = min(LEAVE_SECONDS, self._away_seconds) if pid else self._away_seconds
            if time.monotonic() - begun > limit:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        self._pid = pid
        return True

    async def status(self) -> EngineStatus:
        """What the server says, with counters that go on where those of the one before ended."""
        raw = await _get_status(self._run, self._session, self.base_url)
        totals = {}
        for name in COUNTERS:
            before, now = getattr(self.known, name), getattr(raw, name)
            grown = now - before if now >= before else now
            totals[name] = getattr(self._counted, name) + grown
        self.known, self._counted = raw, msgspec.structs.replace(raw, **totals)
        return self._counted

    async def close(self) -> None:
        await self._session.close()

    async def _post_apply(self, request: ApplyRequest) -> ApplyResult:
        url, body = f"{self.base_url}/gradus/apply", msgspec.json.encode(request)
        return await _ask(self._run, lambda: _send(self._session, url, ApplyResult, body))


async def keep_served(policy: PolicyClient) -> None:
    """Tell every new server what to serve, until cancelled; for whoever has no `EngineWatch`."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        with suppress(DeadlineError, ProcessError, EngineFailed):
            if not (await policy.status()).is_stale:
                continue
            await policy.serve_again()


async def _open(run: _Run) -> tuple[aiohttp.ClientSession, str, EngineStatus]:
    """A session with the server that is ready, its address and status; errors as `connect`."""
    if run.elsewhere is not None:
        base_url = run.elsewhere.address
    else:
        base_url = read_ready(run.run_dir, run.process, InferenceReady).base_url
    token = read_token(run.run_dir.admin_token)
    session = aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        connector=aiohttp.TCPConnector(ssl=client_context(is_own=True)),
        # Every call has its own deadline.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
    )
    try:
        status = await _get_status(run, session, base_url)
        run.check(base_url, status)
    except BaseException:
        await session.close()
        raise
    return session, base_url, status


async def _get_status(run: _Run, session: aiohttp.ClientSession, base_url: str) -> EngineStatus:
    url = f"{base_url}/gradus/status"
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
            return await _ask(run, lambda: _send(session, url, EngineStatus))
    except TimeoutError as error:
        raise DeadlineError(
            f"inference at {base_url} did not report its status in {STATUS_TIMEOUT_SECONDS:g} s"
        ) from error


async def _ask(run: _Run, send: Callable[[], Awaitable[T]]) -> T:
    """The answer, asked for again while connections break, as long as the run's server is the
    same."""
    pid, pause = run.server_pid(), _FIRST_PAUSE_SECONDS
    until = time.monotonic() + run.ask_again_seconds
    while True:
        try:
            return await send()
        except (ConnectionBroken, EngineUnreached, HalfAnswer) as error:
            is_gone = run.elsewhere is None and (pid is None or run.server_pid() != pid)
            if is_gone or time.monotonic() >= until:
                raise
            log.info("%s; asked again in %.2f s", error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


async def _send(
    session: aiohttp.ClientSession, url: str, kind: type[T], body: bytes | None = None
) -> T:
    """What a 200 answer holds; other answers and broken connections are named errors."""
    method = "GET" if body is None else "POST"
    try:
        async with session.request(method, url, data=body) as response:
            answer = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        is_lasting = isinstance(error, aiohttp.ClientSSLError)
        raise (ProcessError if is_lasting else ConnectionBroken)(
            f"inference: {method} {url} failed ({error!r}); the server may have ended, see its log"
        ) from error
    if response.status == 200:
        try:
            return msgspec.json.decode(answer, type=kind)
        except ValueError as error:
            raise HalfAnswer(f"inference sent no valid {kind.__name__}: {error}") from error
    text = answer.decode(errors="replace")[:500]
    # Another orchestrator took over.
    if is_stale(answer):
        raise FencedError(f"inference refused {url}: {text}")
    if response.status == 422 and url.endswith("/gradus/apply"):
        raise CorruptStateError(
            f"inference keeps the version that it served, because it refused the new one: {text}. "
            "Look at the disk; --resume publishes it again from the last checkpoint"
        )
    answered = f"inference answered {response.status} to {method} {url}: {text}"
    if response.status == 401:
        raise UnknownToken(answered)
    if response.status in _PROXY_STATUSES:
        raise EngineUnreached(answered)
    raise (EngineFailed if response.status >= 500 else ProtocolError)(answered)

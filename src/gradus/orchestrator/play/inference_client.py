"""The policy as served: which version is live, and how a new one goes live."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
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
from gradus.run.deadlines import APPLY_SECONDS
from gradus.run.paths import RunDirectory
from gradus.run.ready import InferenceReady, read_ready, read_token
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import ApplyRequest, ApplyResult, EngineStatus, is_stale

T = TypeVar("T")
STATUS_TIMEOUT_SECONDS = 30.0
"""Deadline of one status request; even a paused or busy engine answers it."""


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

    async def close(self) -> None: ...


class InferenceClient:
    """Owns the connection to the run's inference server and the live version.

    >>> client = await InferenceClient.connect(run_dir, term=1, ...)  # doctest: +SKIP
    >>> client.version  # doctest: +SKIP
    0
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        base_url: str,
        run_id: str,
        term: int,
        status: EngineStatus,
        apply_seconds: float,
    ) -> None:
        self.base_url = base_url
        self.version = status.version
        self.newest_version = status.version
        self.kv_capacity_tokens = status.kv_capacity_tokens
        self._session = session
        self._run_id = run_id
        self._term = term
        self._apply_seconds = apply_seconds

    @classmethod
    async def connect(
        cls,
        run_dir: RunDirectory,
        *,
        term: int,
        apply_seconds: float = APPLY_SECONDS,
        process: str = "inference",
    ) -> InferenceClient:
        """The client of one inference server of the run; asks which version it serves.

        ProtocolError when the server at its address is that of another run.
        """
        base_url = read_ready(run_dir, process, InferenceReady).base_url
        token = read_token(run_dir.admin_token)
        session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=None),  # every call has its own deadline
        )
        try:
            status = await _get_status(session, base_url)
            if status.run_id not in ("", run_dir.root.name):
                raise ProtocolError(
                    f"{process} at {base_url} serves run {status.run_id!r}, not "
                    f"{run_dir.root.name!r}; end what took its port"
                )
        except BaseException:
            await session.close()
            raise
        return cls(
            session,
            base_url=base_url,
            run_id=run_dir.root.name,
            term=term,
            status=status,
            apply_seconds=apply_seconds,
        )

    async def apply(self, published: PolicyPublished) -> AppliedPolicy:
        """Ask for the version, then ask the engine which one it serves, and compare.

        DeadlineError after the deadline, FencedError when a newer term rules the engine,
        CorruptStateError when the weights are not those that the trainer wrote, ProtocolError when
        the engine refuses for another reason or serves another version than it was asked for.
        """
        self.newest_version = max(self.newest_version, published.version)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._apply_seconds):
                result = await self._post_apply(published)
                status = await self.status()
        except TimeoutError as error:
            raise DeadlineError(
                f"inference at {self.base_url} did not apply version {published.version} in "
                f"{self._apply_seconds:g} s; logs/inference.log says why"
            ) from error
        if status.version != published.version or result.version != published.version:
            raise ProtocolError(
                f"inference serves version {status.version} after it was asked for "
                f"{published.version}; its log says why"
            )
        self.version = published.version
        seconds = time.monotonic() - begun
        return AppliedPolicy(published.version, seconds, result.pause_seconds, status)

    async def verify(self, published: PolicyPublished) -> None:
        """Let the server read and check a version that it is about to serve; errors as `apply`."""
        await self._post_apply(published, only_verifies=True)

    def addresses(self) -> list[str]:
        return [self.base_url]

    async def status(self) -> EngineStatus:
        return await _get_status(self._session, self.base_url)

    async def close(self) -> None:
        await self._session.close()

    async def _post_apply(
        self, published: PolicyPublished, *, only_verifies: bool = False
    ) -> ApplyResult:
        request = ApplyRequest(
            run_id=self._run_id,
            term=self._term,
            version=published.version,
            directory=published.directory,
            digest=published.digest,
            only_verifies=only_verifies,
        )
        body = await _send(
            self._session, "POST", f"{self.base_url}/gradus/apply", msgspec.json.encode(request)
        )
        return _decode(body, ApplyResult)


async def _get_status(session: aiohttp.ClientSession, base_url: str) -> EngineStatus:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
            body = await _send(session, "GET", f"{base_url}/gradus/status", None)
    except TimeoutError as error:
        raise DeadlineError(
            f"inference at {base_url} did not report its status in {STATUS_TIMEOUT_SECONDS:g} s"
        ) from error
    return _decode(body, EngineStatus)


async def _send(session: aiohttp.ClientSession, method: str, url: str, body: bytes | None) -> bytes:
    """The body of a 200 answer; other answers and broken connections are named errors."""
    try:
        async with session.request(method, url, data=body) as response:
            answer = await response.read()
    except aiohttp.ClientError as error:
        raise ProcessError(
            f"inference: {method} {url} failed ({error!r}); the server may have ended, see its log"
        ) from error
    if response.status == 200:
        return answer
    text = answer.decode(errors="replace")[:500]
    # Another orchestrator took over.
    if is_stale(answer):
        raise FencedError(f"inference refused {url}: {text}")
    if response.status == 422 and url.endswith("/gradus/apply"):
        raise CorruptStateError(
            f"inference keeps the version that it served, because it refused the new one: {text}. "
            "Look at the disk; --resume publishes it again from the last checkpoint"
        )
    raise ProtocolError(f"inference answered {response.status} to {method} {url}: {text}")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise ProtocolError(f"inference sent no valid {kind.__name__}: {error}") from error

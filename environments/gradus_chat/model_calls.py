"""Model calls of the chat harness: one JSON post to the interception endpoint, with retries.

The endpoint is the rollout's own interception server of verifiers, in this process or on loopback.
It answers errors as HTTP: 5xx and 429 may pass when tried again, every other error is the same next
time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import aiohttp

CONNECT_TIMEOUT_SECONDS = 5.0
MAX_RETRY_DELAY_SECONDS = 8.0
RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""Tells the interception server that the same call comes again, so that it commits one turn."""

_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


@dataclass(frozen=True)
class ModelReply:
    """Status and JSON object of one answer."""

    status: int
    payload: dict[str, Any]

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK

    @property
    def may_pass(self) -> bool:
        return self.status in _PASSING or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def error_text(self) -> str:
        error = self.payload.get("error", self.payload)
        text = error.get("message", error) if isinstance(error, dict) else error
        return f"{self.status}: {text}"


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is tried again, and after which delay."""

    max_retries: int
    first_delay_seconds: float

    def delay_seconds(self, retry: int) -> float:
        """Delay before the given retry, counted from 0: doubled each time, with jitter."""
        longest = min(MAX_RETRY_DELAY_SECONDS, self.first_delay_seconds * 2.0**retry)
        return longest * (0.5 + random.random() / 2)


class Connections:
    """Owns the keep-alive connections that all running episodes of an event loop share.

    They open with the first lease and close with the last, so an idle worker holds none.
    """

    def __init__(self, keep_alive_seconds: float = 60.0) -> None:
        self._keep_alive_seconds = keep_alive_seconds
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The loop's HTTP session; open at least as long as the context."""
        loop = asyncio.get_running_loop()
        shared = self._shared.get(loop)
        if shared is None:
            shared = self._shared[loop] = _Shared(_open_session(self._keep_alive_seconds))
        shared.leases += 1
        try:
            yield shared.session
        finally:
            shared.leases -= 1
            if shared.leases == 0:
                del self._shared[loop]
                await shared.session.close()


@dataclass
class _Shared:
    session: aiohttp.ClientSession
    leases: int = 0


def _open_session(keep_alive_seconds: float) -> aiohttp.ClientSession:
    # No limit and no read timeout: verifiers bounds the episodes of a worker and their time.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_seconds),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )


class Transport(Protocol):
    """Carries one request to the interception server."""

    async def post(
        self, url: str, content: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]: ...


@dataclass(frozen=True)
class HttpTransport:
    """Carries requests over HTTP."""

    http: aiohttp.ClientSession

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer; aiohttp.ClientError when there is none."""
        async with self.http.post(url, data=content, headers=headers) as response:
            return response.status, await response.read()


@dataclass(frozen=True)
class Endpoint:
    """One rollout's door to the interception server: address and bearer."""

    transport: Transport
    url: str
    secret: str
    retry: RetryPolicy

    async def complete(self, body: dict[str, Any]) -> ModelReply:
        """The answer to one chat completion; the last one when retries do not help.

        Raises aiohttp.ClientError when the server cannot be reached.
        """
        content = json.dumps(body).encode()
        for retry in range(self.retry.max_retries):
            try:
                reply = await self._post(f"{self.url}/chat/completions", content, retry)
            except aiohttp.ClientError:
                pass
            else:
                if not reply.may_pass:
                    return reply
            await asyncio.sleep(self.retry.delay_seconds(retry))
        return await self._post(f"{self.url}/chat/completions", content, self.retry.max_retries)

    async def ask_gate(self, gate_url: str, call: dict[str, Any]) -> ModelReply:
        """The verdict on one tool call, before it is made."""
        return await self._post(gate_url, json.dumps(call).encode(), 0)

    async def _post(self, url: str, content: bytes, retry: int) -> ModelReply:
        headers = {"Authorization": f"Bearer {self.secret}", "Content-Type": "application/json"}
        if retry:
            headers[RETRY_COUNT_HEADER] = str(retry)
        status, raw = await self.transport.post(url, content, headers)
        try:
            payload = json.loads(raw)
        except ValueError:
            payload = {"error": raw[:500].decode(errors="replace")}
        return ModelReply(status, payload if isinstance(payload, dict) else {"error": payload})

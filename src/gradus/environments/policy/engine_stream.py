"""The client's end of a token connection: all requests of a worker to one engine share it."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
from aiohttp import ConnectionTimeoutError
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL

from gradus.errors import ProtocolError
from gradus.processes.secured import client_context
from gradus.wire.codec import decode
from gradus.wire.inference import STALE_WEIGHTS, reason_of
from gradus.wire.token_stream import (
    ASK_ELSEWHERE,
    STREAM_NAME,
    STREAM_ROUTE,
    FrameReader,
    TokenAnswer,
    TokenAnswers,
    TokenPart,
    TokenQuestion,
    TokenQuestions,
    frame,
    frames,
)

GENERATE_PATH = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"
_KNOWN_KEYS = frozenset({"model", "token_ids", "sampling_params", "cache_salt", "priority"})
_MAX_HEAD_BYTES = 65_536
_CONTENT_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


Hear = Callable[[list[int]], None]
"""Told the tokens of a reply so far, each time that there are more."""


class ConnectionEnded(ConnectionError):
    """The engine closed the connection before it answered."""


class EngineStale(ConnectionError):
    """The engine answers nobody yet; it opens once it was told which version it serves."""


class TokenStream:
    """Owns the token connection to one engine; opened by the first request, again when it ended.

    stream = TokenStream("http://127.0.0.1:8000", token, connect_seconds=5.0, read_seconds=None)
    answer = await stream.ask(body, session_id=None)  # None: ask the ordinary route
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        connect_seconds: float | None,
        read_seconds: float | None,
        is_plain: bool = True,
        is_own: bool = True,
    ) -> None:
        """Without `is_plain`, requests have their own headers, which only HTTP can carry; without
        `is_own`, the server is none of the run."""
        self._address = urlsplit(base_url)
        self._token = token
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._opening = asyncio.Lock()
        self._connection: _Connection | None = None
        trust = client_context(is_own=is_own) if self._address.scheme == "https" else None
        self._tls = ssl.create_default_context() if trust is True else trust
        has_authority = isinstance(trust, ssl.SSLContext)  # then no proxy reaches it
        # What answers by HTTPS for another may know HTTP alone.
        is_known = is_own or trust is not True
        self._is_offered = is_plain and is_known and (has_authority or not _has_proxy(base_url))
        self._numbers = itertools.count()

    async def ask(
        self,
        body: Mapping[str, Any],
        *,
        session_id: str | None,
        is_again: bool = False,
        hear: Hear | None = None,
    ) -> TokenAnswer | None:
        """The engine's answer; None where only its ordinary route can give one.

        Raises TimeoutError and OSError, ConnectionTimeoutError, ConnectionEnded and EngineStale
        among them.
        """
        if not self._is_offered or not _KNOWN_KEYS.issuperset(body):
            return None
        connection = await self._open()
        if connection is None:
            return None
        question = TokenQuestion(
            number=next(self._numbers),
            token_ids=np.asarray(body["token_ids"], np.int32),
            sampling_params=body["sampling_params"],
            model=body.get("model"),
            cache_salt=body.get("cache_salt"),
            session_id=session_id,
            priority=body.get("priority", 0),
            is_again=is_again,
            is_streamed=hear is not None,
        )
        async with asyncio.timeout(self._read_seconds):
            answer = await connection.ask(question, hear)
        return None if answer.status == ASK_ELSEWHERE else answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _open(self) -> _Connection | None:
        """A connection that lives; None when the server does not offer any."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self._connect()
                # Another server than ours, or no access to it: its own route says which.
                self._is_offered = self._connection is not None
            return self._connection

    async def _connect(self) -> _Connection | None:
        host, port = self._address.hostname or "", self._address.port or (443 if self._tls else 80)
        method, path = STREAM_ROUTE
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Authorization: Bearer {self._token}\r\n"
            f"Connection: Upgrade\r\nUpgrade: {STREAM_NAME}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(head.encode("latin-1")), host, port, ssl=self._tls
                )
        except TimeoutError as error:
            text = f"no connection to {self._address.netloc} in {self._connect_seconds} s"
            raise ConnectionTimeoutError(text) from error
        try:
            async with asyncio.timeout(self._read_seconds):
                reply = await connection.granted
        except BaseException:
            connection.close()
            raise
        if reply is None:
            return connection
        if reason_of(reply) == STALE_WEIGHTS:
            raise EngineStale("the engine was not told yet which version it serves")
        return None


class _Connection(asyncio.Protocol):
    """One socket: the upgrade, then frames; sends what one round of the loop asked together."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[bytes | None] = self._loop.create_future()
        """None when it is; otherwise the body of the refusal."""
        self._reply_head = bytearray()
        self._frames = FrameReader()
        self._waiting: dict[int, asyncio.Future[TokenAnswer]] = {}
        self._hearing: dict[int, tuple[list[int], Hear]] = {}
        self._asked: list[TokenQuestion] = []
        self._cancelled: list[int] = []
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, question: TokenQuestion, hear: Hear | None = None) -> TokenAnswer:
        """The answer; ConnectionEnded when none can come. Cancelled, it is cancelled there too."""
        answered: asyncio.Future[TokenAnswer] = self._loop.create_future()
        self._waiting[question.number] = answered
        if hear is not None:
            self._hearing[question.number] = ([], hear)
        self._send_soon()
        self._asked.append(question)
        try:
            return await answered
        except asyncio.CancelledError:
            if self._waiting.pop(question.number, None) is not None:
                self._send_soon()
                self._cancelled.append(question.number)
            raise
        finally:
            self._hearing.pop(question.number, None)

    def _send_soon(self) -> None:
        if not self._asked and not self._cancelled:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        asked, cancelled = self._asked, self._cancelled
        self._asked, self._cancelled = [], []
        if self._transport is None:
            return
        if asked:
            # Before what is cancelled: a request may be among both.
            self._transport.write(self._frames_of(asked))
        if cancelled:
            self._transport.write(frame(TokenQuestions([], cancelled)))

    def _frames_of(self, asked: list[TokenQuestion]) -> bytes:
        """What asks these; a request that no message can hold is left to the ordinary route."""
        try:
            return frames(lambda part: TokenQuestions(part, []), asked)
        except Exception:
            if len(asked) > 1:
                return b"".join(self._frames_of([question]) for question in asked)
            self._settle([TokenAnswer.without_tokens(asked[0].number, ASK_ELSEWHERE)])
            return b""

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports have the methods of asyncio's, not their class.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        """The head of the answer first, then frames."""
        if not self.granted.done():
            self._reply_head += data
            head, end, data = bytes(self._reply_head).partition(b"\r\n\r\n")
            length = _CONTENT_LENGTH.search(head)
            is_whole = end and (length is None or len(data) >= int(length[1]))
            if not is_whole and len(self._reply_head) < _MAX_HEAD_BYTES:
                return
            is_granted = bool(end) and head.split(b" ", 2)[1:2] == [b"101"]
            self.granted.set_result(None if is_granted else data)
            if not is_granted:
                self.close()
                return
        try:
            for body in self._frames.feed(data):
                message: TokenAnswers = decode(body, TokenAnswers)
                self._tell(message.parts)
                self._settle(message.answers)
        except ProtocolError as error:
            self._fail(f"the engine's answer cannot be read: {error}")
            self.close()

    def _tell(self, parts: list[TokenPart]) -> None:
        for part in parts:
            if part.number in self._hearing:
                tokens, hear = self._hearing[part.number]
                tokens += part.token_ids
                hear(tokens)

    def _settle(self, answers: list[TokenAnswer]) -> None:
        for answer in answers:
            waiting = self._waiting.pop(answer.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"the engine closed the connection: {exc or 'end of stream'}")

    def _fail(self, reason: str) -> None:
        if not self.granted.done():
            self.granted.set_exception(ConnectionEnded(reason))
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            if not answered.done():
                answered.set_exception(ConnectionEnded(reason))


def _has_proxy(base_url: str) -> bool:
    try:
        get_env_proxy_for_url(URL(base_url))
    except LookupError:
        return False
    return True

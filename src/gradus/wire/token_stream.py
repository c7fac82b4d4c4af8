"""Many generate requests over one connection: token ids in, token ids and logprobs out.

A client upgrades an HTTP connection of the inference server with the run's token. From then on both
sides send frames, each a length and a message of the codec. What does not fit in here, and every
refusal with its text, is left to vLLM's own generate route: the answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol, TypeVar, cast

import msgspec
import numpy as np

from gradus.errors import ProtocolError
from gradus.wire.codec import decode, encode
from gradus.wire.versions import VersionRuns

STREAM_ROUTE = ("GET", "/gradus/tokens")
STREAM_NAME = "gradus-tokens-1"
"""Of the protocol in the Upgrade header; a change of a message below needs another, but for a field
with a default at its end, which an older end ignores."""
ACCEPTED_HEAD = (
    "HTTP/1.1 101 Switching Protocols\r\n"
    f"Connection: Upgrade\r\nUpgrade: {STREAM_NAME}\r\nContent-Length: 0\r\n\r\n"
).encode()
MAX_FRAME_BYTES = 64 << 20
FRAME_SECONDS = 60.0
"""How long the rest of a frame may take."""
ASK_ELSEWHERE = HTTPStatus.SEE_OTHER.value
"""Status of a request that vLLM's own route must answer."""
_LENGTH_BYTES = 4

Item = TypeVar("Item")


class TokenQuestion(msgspec.Struct, frozen=True, array_like=True):
    """One generate request."""

    number: int
    """Chosen by the client; names the answer."""
    token_ids: np.ndarray[Any, Any]
    """[T] int32, the prompt."""
    sampling_params: dict[str, Any]
    model: str | None
    cache_salt: str | None
    session_id: str | None
    priority: int = 0
    is_again: bool = False
    """Whether an earlier server at this address did not answer it."""
    is_streamed: bool = False
    """Whether the tokens are told as they are sampled, before the answer, which holds them all."""

    def check(self) -> None:
        """ProtocolError unless the prompt is a row of whole numbers."""
        if self.token_ids.ndim != 1 or self.token_ids.dtype.kind != "i":
            raise ProtocolError(
                f"token_ids: {self.token_ids.dtype} of shape {self.token_ids.shape}, "
                "one row of int32 is needed"
            )


class TokenQuestions(msgspec.Struct, frozen=True, array_like=True):
    """What a client sends: new requests, and the numbers of those that it no longer waits for."""

    asked: list[TokenQuestion]
    cancelled: list[int]


class TokenAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What became of one request."""

    number: int
    status: int
    """As in HTTP. 200 has tokens; 303 means that vLLM's own route must be asked."""
    request_id: str
    token_ids: np.ndarray[Any, Any]
    """[T] int32, the reply."""
    logprobs: np.ndarray[Any, Any]
    """[T] float32 nats of each token of the reply."""
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    error: bytes = b""
    """The JSON body with which vLLM's own route would answer this status."""
    versions: VersionRuns = []
    """Which versions sampled the reply; empty where the engine does not say."""
    experts: np.ndarray[Any, Any] | None = None
    """[tokens, layers, k] uint8 or uint16: which experts computed each token of prompt and reply,
    from that which was asked for (`routed_experts_prompt_start`) to the last but one; None where
    the engine does not say."""

    @classmethod
    def without_tokens(cls, number: int, status: int, error: bytes = b"") -> TokenAnswer:
        """An answer that says only what happened."""
        return cls(number, status, "", _NO_TOKENS, _NO_LOGPROBS, error=error)


class TokenPart(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a reply that goes on."""

    number: int
    token_ids: list[int]


class TokenAnswers(msgspec.Struct, frozen=True, array_like=True):
    """What a server sends: answers that were ready in one round of its loop, parts before them."""

    answers: list[TokenAnswer]
    parts: list[TokenPart] = []


_NO_TOKENS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


def frame(message: msgspec.Struct) -> bytes:
    body = encode(message)
    return len(body).to_bytes(_LENGTH_BYTES) + body


def frames(
    build: Callable[[list[Item]], msgspec.Struct],
    items: list[Item],
    *,
    max_bytes: int = MAX_FRAME_BYTES,
) -> bytes:
    """Messages that hold these items in order, as few as the limit of a frame allows.

    One item that is too long alone stays so; the other end refuses it.
    """
    whole = frame(build(items))
    if len(whole) <= max_bytes + _LENGTH_BYTES or len(items) < 2:
        return whole
    middle = len(items) // 2
    halves = (items[:middle], items[middle:])
    return b"".join(frames(build, half, max_bytes=max_bytes) for half in halves)


class FrameReader:
    """Cuts a stream of bytes into frames.

    >>> reader = FrameReader()
    >>> reader.feed(bytes([0, 0, 0, 2, 7])), reader.feed(bytes([8])), reader.is_partial
    ([], [b'\\x07\\x08'], False)
    """

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()

    @property
    def is_partial(self) -> bool:
        return bool(self._received)

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies of the frames that are whole now; ProtocolError for one that is too long."""
        received = self._received
        received += data
        frames = []
        at = 0
        while len(received) - at >= _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            size = int.from_bytes(received[at:start])
            if size > self._max_bytes:
                raise ProtocolError(f"a frame of {size} bytes; {self._max_bytes} are allowed")
            if len(received) < start + size:
                break
            frames.append(bytes(received[start : start + size]))
            at = start + size
        del received[:at]
        return frames


class TokenService(Protocol):
    """Answers the requests of token connections."""

    def ask(self, connection: TokenConnection, questions: list[TokenQuestion]) -> None:
        """Begin to answer with `connection.answer`, each number once."""

    def cancel(self, connection: TokenConnection, numbers: list[int]) -> None:
        """The client left these; no answer is needed."""

    def disconnect(self, connection: TokenConnection) -> None:
        """The client left all requests of the connection."""


class TokenConnection(asyncio.Protocol):
    """The server's end: owns the socket, collects the answers of one round of the loop.

    A frame that is too long, is not a message, or does not arrive in time closes the connection. A
    client that does not read its answers is not read either.
    """

    def __init__(
        self,
        service: TokenService,
        *,
        max_bytes: int = MAX_FRAME_BYTES,
        frame_seconds: float = FRAME_SECONDS,
        on_close: Callable[[TokenConnection], None] = lambda _: None,
    ) -> None:
        self._service = service
        self._frames = FrameReader(max_bytes=max_bytes)
        self._frame_seconds = frame_seconds
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._ready: list[TokenAnswer] = []
        self._parts: list[TokenPart] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports have the methods of asyncio's, not their class.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Drop what was asked here."""
        self._transport = None
        self._stop_deadline()
        self._service.disconnect(self)
        self._on_close(self)

    def data_received(self, data: bytes) -> None:
        """Hand whole frames to the service."""
        try:
            bodies = self._frames.feed(data)
            for body in bodies:
                message: TokenQuestions = decode(body, TokenQuestions)
                if message.asked:
                    self._service.ask(self, message.asked)
                if message.cancelled:
                    self._service.cancel(self, message.cancelled)
        except ProtocolError:
            self.abort()
            return
        if bodies:
            self._stop_deadline()
        if self._frames.is_partial and self._deadline is None:
            self._deadline = self._loop.call_later(self._frame_seconds, self.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def answer(self, answer: TokenAnswer) -> None:
        """Send an answer, together with the others of this round of the loop."""
        self._flush_soon()
        self._ready.append(answer)

    def tell(self, part: TokenPart) -> None:
        """Send tokens of a reply that goes on."""
        self._flush_soon()
        self._parts.append(part)

    def _flush_soon(self) -> None:
        if not self._ready and not self._parts:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        ready, self._ready = self._ready, []
        parts, self._parts = self._parts, []
        if parts:
            self.send_raw(frame(TokenAnswers([], parts)))
        if ready:
            self.send_raw(frames(TokenAnswers, ready))

    def send_raw(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

"""The connection between a launcher and a node side, which outlives the sockets that carry it.

The sockets speak TLS with the run's certificates (`certificates.py`), so that nobody else reads,
speaks, repeats or changes a frame. Messages are numbered and kept until they are acknowledged: what
a cut lost comes again, once and in order.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gradus.errors import ProtocolError
from gradus.log import LogSettings
from gradus.processes.started import Fault, ProcessSpec
from gradus.wire.codec import decode, encode

BEAT_SECONDS = 1.0
"""Between two signs of life of each end."""
SILENT_SECONDS = 5 * BEAT_SECONDS
"""After so long without a frame a node side tries another socket."""
_HEAD = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The node side's first frame: who it is."""

    incarnation: str
    """Random; another process on the same node has another."""
    number: int | None
    """Which node of the run it is; None lets the launcher choose."""
    host: str
    run_dir: str
    gradus: str
    python: str
    address: str
    """Where the other nodes reach this one."""
    port: int
    """A free one there, for ranks to meet at."""
    num_gpus: int
    received: int
    """The last message that it has from the launcher."""
    replaces: str = ""
    """The incarnation that was killed on the same machine, and of which nothing runs any more."""
    term: int = 0
    """Of the launcher that it has joined; 0 for none yet."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The launcher's answer."""

    number: int
    term: int
    received: int
    """The last message that the launcher has from this node side."""
    away_seconds: float
    hang_seconds: float


class TurnedAway(msgspec.Struct, frozen=True, tag=True):
    """The answer to a node side that has no place in the run."""

    reason: str
    exit_code: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a child; `order` is an `Order`, with its variables."""

    child: int
    order: bytes


class EndAll(msgspec.Struct, frozen=True, tag=True):
    """End all children, by force when those seconds are over that each of their orders names."""

    round: int


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """Whoever is still ending is killed now."""


class Bury(msgspec.Struct, frozen=True, tag=True):
    """A child that ended is replaced: kill what it left."""

    child: int


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The run has ended; so may the node side."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A child has ended, with what would be said if it should not have."""

    child: int
    code: int
    message: str
    exit_code: int
    fault: Fault
    log_tail: list[str]


class AllEnded(msgspec.Struct, frozen=True, tag=True):
    """All children have ended after a `EndAll`."""

    round: int
    error: str = ""


class Left(msgspec.Struct, frozen=True, tag=True):
    """The node side ends, and nothing that it started runs any more."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """A line for the person at the launcher's terminal."""

    line: str


Message = Beat | Start | EndAll | Hurry | Bury | Dismissed | Ended | AllEnded | Left | Told


class _Frame(msgspec.Struct, frozen=True):
    number: int
    acknowledged: int
    message: Message


@dataclass(frozen=True)
class Order:
    """What a `Start` says of the child."""

    spec: ProcessSpec
    logs: LogSettings
    stop_seconds: float

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, content: bytes) -> Order:
        """ProtocolError for what is no order."""
        try:
            return msgspec.json.decode(content, type=cls, dec_hook=_path)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"no order to start a process: {error}") from error


def _path(kind: type, value: Any) -> Any:
    if not issubclass(kind, Path) or not isinstance(value, str):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return Path(value)


@dataclass(frozen=True)
class _Sent:
    number: int
    at: float
    message: Message


_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Channel:
    """Owns one socket: frames in and out."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        with contextlib.suppress(OSError):  # a socket pair has no such option
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.opened_at = time.monotonic()
        self.is_ended = False
        """Whether the other end has closed it, after what was read."""
        self._read = bytearray()
        self._unsent = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """What the socket does not take at once goes with `flush`; OSError when it is gone."""
        body = encode(message)
        self._unsent += _HEAD.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(*_NOT_NOW):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def read(self) -> None:
        """Take what has arrived; OSError when the connection is broken, or not of this run."""
        with contextlib.suppress(*_NOT_NOW):
            while len(self._read) <= _MAX_FRAME_BYTES:
                arrived = self.socket.recv(_READ_BYTES)
                if not arrived:
                    self.is_ended = True
                    return
                self._read += arrived

    def next_body(self) -> bytes | None:
        """The next whole frame, or None; ProtocolError for one that is longer than any."""
        if len(self._read) < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(self._read)
        if size > _MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {size} bytes is longer than any")
        if len(self._read) < _HEAD.size + size:
            return None
        body = bytes(self._read[_HEAD.size : _HEAD.size + size])
        del self._read[: _HEAD.size + size]
        return body

    def close(self) -> None:
        self.socket.close()


class Link:
    """Owns what one end has said and heard, over all sockets.

    >>> link = Link()
    >>> link.send(Beat())
    >>> link.num_unacknowledged
    1
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.channel: Channel | None = None
        self.received = 0
        self.safe_at = clock()
        """When this end sent the newest message that the other is known to have: the other end has
        heard of this one no earlier."""
        self.heard_at = clock()
        """When this end has heard the other last."""
        self._next = 1
        self._kept: deque[_Sent] = deque()
        self._beat_at = clock()

    @property
    def num_unacknowledged(self) -> int:
        return len(self._kept)

    def send(self, message: Message) -> None:
        sent = _Sent(self._next, self._clock(), message)
        self._next += 1
        self._kept.append(sent)
        self._put(sent)

    def beat(self) -> None:
        """Give a sign of life where one is due, and send what a socket did not take."""
        if self.channel is None:
            return
        if self._clock() - self._beat_at >= BEAT_SECONDS:
            self._beat_at = self._clock()
            self.send(Beat())
        with self._dropping():
            if self.channel is not None:
                self.channel.flush()

    def open(self, channel: Channel, received: int) -> None:
        """Continue on a new socket, with what the other end, which has `received`, has not."""
        self.drop()
        self.channel, self.heard_at = channel, self._clock()
        self._acknowledged(received)
        for sent in list(self._kept):
            self._put(sent)

    def drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def take(self) -> list[Message]:
        """What has arrived and was not there before; a socket that is gone is dropped."""
        taken: list[Message] = []
        with self._dropping():
            if self.channel is not None:
                self.channel.read()
            while self.channel is not None and (body := self.channel.next_body()) is not None:
                frame: _Frame = decode(body, _Frame)
                self.heard_at = self._clock()
                self._acknowledged(frame.acknowledged)
                if frame.number > self.received + 1:
                    raise ProtocolError(f"message {self.received + 1} is missing")
                if frame.number == self.received + 1:
                    self.received = frame.number
                    taken.append(frame.message)
            if self.channel is not None and self.channel.is_ended:
                self.drop()
        return taken

    def _acknowledged(self, number: int) -> None:
        while self._kept and self._kept[0].number <= number:
            self.safe_at = max(self.safe_at, self._kept.popleft().at)

    def _put(self, sent: _Sent) -> None:
        with self._dropping():
            if self.channel is not None:
                self.channel.send(_Frame(sent.number, self.received, sent.message))

    def _dropping(self) -> contextlib.AbstractContextManager[None]:
        return _Dropping(self)


class _Dropping(contextlib.AbstractContextManager[None]):
    """Within this block a socket that fails, or on which a stranger speaks, is dropped."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, OSError | ProtocolError):
            return False
        self._link.drop()
        return True

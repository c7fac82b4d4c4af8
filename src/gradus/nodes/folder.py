"""The run's folder where a node does not see it: what of it travels, which way, in which words.

A node side keeps a mirror at the same path and asks the launcher, which answers for the run's
folder. What is sealed travels by ranges of its files into the hidden folder in which the other end
stages it, is compared with its manifest, and gets its name by one rename.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gradus.errors import CorruptStateError, ProtocolError, StorageError
from gradus.files import storage_error
from gradus.sealed import FileEntry, open_sealed
from gradus.wire.codec import decode, encode
from gradus.wire.images import ImageSpan

PIECE_BYTES = 4 << 20
"""The longest range of a file that travels at once."""
QUIET_SECONDS = 30.0
"""After so long without an answer, or a request, a connection is given up for another."""
PLACING_SECONDS = 1200.0
"""The same where the other end reads, or syncs, all of a folder first."""
CHECKPOINTS = "checkpoints"
TRAINER, REPLICA = "trainer", "replica"
"""What runs on a node, as far as it says what it needs of the folder."""

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
_BELOW = rf"{_NAME}(?:/{_NAME})*"
_SEALED = (
    rf"spool/batch_\d{{8}}|weights/version_\d{{8}}|{CHECKPOINTS}/step_\d{{8}}(?:\.term_\d{{8}})?"
)
_DOWN = re.compile(
    rf"lease\.json|\.gradus-run|config/{_BELOW}|from_python/{_BELOW}|control/save|"
    rf"secrets/(?:(?:inference|admin)_token|authority\.pem)|spool/end\.msgpack|(?:{_SEALED})/{_BELOW}|"
    r"replay/images/[0-9a-f]{64}"
)
_BOTH = re.compile(rf"ready/{_NAME}|spool/events/{_NAME}")
"""Whole files that the node makes and the launcher's end deletes, or the node itself."""
_UP = re.compile(rf"alive/{_BELOW}|tokens/{_BELOW}")
_GIVEN_BACK = re.compile(r"control/save|weights/version_\d{8}")
"""What a node deletes beside its own files: a request that is met, a version that is old."""
_GROWING = re.compile(rf"logs/{_BELOW}\.log|audit\.jsonl|notices\.log")
_HANDED_OVER = re.compile(
    rf"(?:weights/version_\d{{8}}|model|adapter)|{CHECKPOINTS}/\.step_\d{{8}}\.tmp-\d+/trainer"
)
SEALED = re.compile(_SEALED)
_ALWAYS = ("lease.json", ".gradus-run", "config", "from_python", "control", "secrets", "ready")
_MAX_FRAME_BYTES = PIECE_BYTES + (1 << 20)
_HEAD = struct.Struct(">I")
T = TypeVar("T")


class Opening(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a connection for the folder."""

    incarnation: str
    """Of the node side, which has joined."""
    way: str = ""
    """What it is for, "fetches" or "brings": a later one for the same takes its place."""


class Look(msgspec.Struct, frozen=True, tag=True):
    """Asks for the listing, once it is another one or the seconds are over."""

    wanted: list[str]
    seconds: float
    with_checkpoints: bool


class Listing(msgspec.Struct, frozen=True, tag=True):
    """What the node should have: path → what tells one content from another."""

    entries: dict[str, str]


class ReadRange(msgspec.Struct, frozen=True, tag=True):
    path: str
    offset: int


class FileRange(msgspec.Struct, frozen=True, tag=True):
    """A range of a file; a short one is the last."""

    content: bytes


class Put(msgspec.Struct, frozen=True, tag=True):
    """A range of a file that appears with its last one."""

    path: str
    offset: int
    content: bytes
    is_last: bool


class Append(msgspec.Struct, frozen=True, tag=True):
    """What a growing file got; `offset` counts in what this node side wrote into it."""

    path: str
    offset: int
    content: bytes


class AskStaged(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of each file of a folder lies staged."""

    folder: str
    files: dict[str, FileEntry]


class Staged(msgspec.Struct, frozen=True, tag=True):
    sizes: dict[str, int]
    is_there: bool
    """Whether the whole folder has its name already."""


class PutPiece(msgspec.Struct, frozen=True, tag=True):
    folder: str
    file: str
    offset: int
    content: bytes


class Finish(msgspec.Struct, frozen=True, tag=True):
    """All files of a folder are staged: compare them, and give it its name."""

    folder: str
    files: dict[str, FileEntry]


class Delete(msgspec.Struct, frozen=True, tag=True):
    path: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """It lies in the run's folder now."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why not; what is full or damaged may be asked for again."""

    reason: str
    is_passing: bool


Request = Look | ReadRange | Put | Append | AskStaged | PutPiece | Finish | Delete
Answer = Listing | FileRange | Staged | Done | Refused


class Talk:
    """Owns one connection about the folder: whole messages, one after the other."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(QUIET_SECONDS)
        self._socket = connected

    def send(self, message: msgspec.Struct) -> None:
        """ConnectionError when the connection is gone."""
        body = encode(message)
        try:
            self._socket.sendall(_HEAD.pack(len(body)) + body)
        except OSError as error:
            raise ConnectionError(f"cannot be sent: {error}") from error

    def receive(self, kind: Any) -> Any:
        """ConnectionError when the connection is gone, ProtocolError for what is no such
        message."""
        (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > _MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {size} bytes is longer than any")
        return decode(bytes(self._exactly(size)), kind)

    def ask(self, request: Request, kind: type[T]) -> T:
        """StorageError when it is refused for now, CorruptStateError when for good."""
        is_long = isinstance(request, AskStaged | Finish)
        self._socket.settimeout(PLACING_SECONDS if is_long else QUIET_SECONDS)
        self.send(request)
        answer = self.receive(Answer)
        if isinstance(answer, Refused):
            failure = StorageError if answer.is_passing else CorruptStateError
            raise failure(f"the launcher says: {answer.reason}")
        if not isinstance(answer, kind):
            raise ProtocolError(f"{type(answer).__name__} is no answer to {request}")
        return answer

    def end(self) -> None:
        """Wake whoever waits in another thread, with the end of the connection."""
        with contextlib.suppress(OSError):
            # That of TLS would let the other thread go on without it, in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        content = bytearray(size)
        view, filled = memoryview(content), 0
        while filled < size:
            try:
                taken = self._socket.recv_into(view[filled:])
            except OSError as error:
                raise ConnectionError(f"nothing arrives: {error}") from error
            if not taken:
                raise ConnectionError("the other end has closed the connection")
            filled += taken
        return content


def may_read(path: str) -> bool:
    return bool(_DOWN.fullmatch(path) or _BOTH.fullmatch(path))


class _Shown(msgspec.Struct):
    images: list[list[ImageSpan]] = []


class _Part(msgspec.Struct):
    micro_batches: list[_Shown]


def images_of(part: bytes) -> set[str]:
    """The paths of the images that one rank's part of a batch shows."""
    shown: list[_Shown] = decode(part, _Part).micro_batches
    return {f"replay/images/{span.sha256}" for it in shown for spans in it.images for span in spans}


def may_put(path: str) -> bool:
    return bool(_UP.fullmatch(path) or _BOTH.fullmatch(path))


def may_delete(path: str) -> bool:
    return may_put(path) or bool(_GIVEN_BACK.fullmatch(path))


def may_append(path: str) -> bool:
    return bool(_GROWING.fullmatch(path))


def may_stage(folder: str, files: Sequence[str]) -> bool:
    inner = all(re.fullmatch(_BELOW, name) for name in files)
    return inner and bool(_HANDED_OVER.fullmatch(folder))


def listing(root: Path, wanted: Sequence[str], *, with_checkpoints: bool) -> dict[str, str]:
    """What a node on which `wanted` runs should have."""
    places = list(_ALWAYS)
    if TRAINER in wanted:
        places.append("spool")
    if REPLICA in wanted:
        places.append("weights")
    entries = {path: sign for place in places for path, sign in _entries(root, place)}
    if with_checkpoints and TRAINER in wanted:
        newest = sorted(_entries(root, CHECKPOINTS))[-2:]
        entries |= dict(newest)
    return entries


def is_listed(path: str, wanted: Sequence[str], *, with_checkpoints: bool) -> bool:
    """Whether a listing for this would name the path if it were there."""
    place = path.partition("/")[0]
    if place == CHECKPOINTS:
        return with_checkpoints and TRAINER in wanted
    role = {"spool": TRAINER, "weights": REPLICA}.get(place)
    return role is None or role in wanted


def _entries(root: Path, place: str) -> Iterator[tuple[str, str]]:
    path = root / place
    try:
        if path.is_dir() and SEALED.fullmatch(place):
            found = path.stat()
            yield place, _digest(path, found.st_ino, found.st_mtime_ns)
        elif path.is_dir():
            for name in sorted(os.listdir(path)):  # A trainer refuses a batch that others overtake.
                yield from _entries(root, f"{place}/{name}")
        elif may_read(place):
            yield place, signature(path)
    except (OSError, CorruptStateError):
        return  # It went while it was looked at.


@lru_cache(maxsize=256)
def _digest(folder: Path, inode: int, changed_at: int) -> str:  # noqa: ARG001
    """That of a sealed folder, which is read once."""
    return open_sealed(folder, Any).digest


def signature(path: Path) -> str:
    found = path.lstat()
    return f"{found.st_mtime_ns}.{found.st_size}"


def read_piece(path: Path, offset: int) -> bytes:
    """At most PIECE_BYTES; CorruptStateError for what is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return os.pread(descriptor, PIECE_BYTES, offset)
    finally:
        os.close(descriptor)


def write_piece(path: Path, offset: int, content: bytes) -> None:
    """StorageError when the disk does not take it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            view = memoryview(content)
            while view:
                taken = os.pwrite(descriptor, view, offset)
                view, offset = view[taken:], offset + taken
            os.ftruncate(descriptor, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, path, needed_bytes=len(content)) from error


def size_of(path: Path) -> int:
    """0 for a file that is not there."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0

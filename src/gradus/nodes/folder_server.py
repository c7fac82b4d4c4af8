"""The launcher's end of a mirror: answers for the run's folder, as far as its table allows."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from gradus.errors import (
    ConfigError,
    CorruptStateError,
    FencedError,
    GradusError,
    ProtocolError,
    StorageError,
)
from gradus.files import DurableFiles, append_whole, storage_error, write_atomically
from gradus.log import get_logger
from gradus.nodes.folder import (
    Answer,
    Append,
    AskStaged,
    Delete,
    Done,
    FileRange,
    Finish,
    Listing,
    Look,
    Opening,
    Put,
    PutPiece,
    ReadRange,
    Refused,
    Request,
    Staged,
    Talk,
    listing,
    may_append,
    may_delete,
    may_put,
    may_read,
    may_stage,
    read_piece,
    size_of,
    write_piece,
)
from gradus.run.paths import RunDirectory
from gradus.sealed import (
    MANIFEST_NAME,
    Entries,
    discard,
    file_entry,
    open_sealed,
    put_in_place,
    staging_path,
)

_LOG = get_logger(__name__)
_LOOK_SECONDS = 0.05
_VERSION = re.compile(r"weights/version_\d{8}")


class _Label(msgspec.Struct, frozen=True):
    """What every label of weights says."""

    term: int


class FolderServer:
    """Owns what the node sides of a launch sent into the run's folder.

    >>> server = FolderServer(run_dir, check=lease.check, term=lambda: lease.term)
    ... # doctest: +SKIP
    """

    def __init__(
        self, run_dir: RunDirectory, *, check: Callable[[], None], term: Callable[[], int]
    ) -> None:
        """`check` raises FencedError once another launcher has the run."""
        self._root = run_dir.root
        self._check = check
        self._term = term
        self._files = DurableFiles()
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._grown: dict[tuple[str, str], int] = {}  # incarnation, path → bytes it appended
        self._newest: dict[Opening, Talk] = {}
        self._turns: defaultdict[Opening, threading.Lock] = defaultdict(threading.Lock)

    def serve(
        self, talk: Talk, opening: Opening, is_joined: Callable[[], bool]
    ) -> threading.Thread:
        """Answer a node in a thread until the connection is gone, the node has another one for the
        same or was given up, or the run is another's.

        What still arrives on an earlier connection is old: the node has said it again since, and
        may have deleted it.
        """
        self._newest[opening] = talk
        arguments = (talk, opening, is_joined)
        thread = threading.Thread(target=self._serve, args=arguments, name="folder", daemon=True)
        thread.start()
        return thread

    def _serve(self, talk: Talk, opening: Opening, is_joined: Callable[[], bool]) -> None:
        last: dict[str, str] | None = None

        def is_newest() -> bool:
            return is_joined() and self._newest[opening] is talk

        with contextlib.suppress(OSError, ProtocolError), contextlib.closing(talk):
            while True:
                request = talk.receive(Request)
                with self._turns[opening]:
                    if not is_newest():
                        return
                    try:
                        if isinstance(request, Look):
                            last = self._look(request, last, is_newest)
                            answer: Answer = Listing(last)
                        else:
                            answer = self._answer(request, opening.incarnation, is_joined)
                    except FencedError as error:
                        _LOG.warning("a node is not answered any more: %s", error)
                        return
                    except (GradusError, OSError) as error:
                        answer = Refused(str(error), isinstance(error, StorageError))
                talk.send(answer)

    def _look(
        self, look: Look, last: dict[str, str] | None, is_joined: Callable[[], bool]
    ) -> dict[str, str]:
        deadline = time.monotonic() + min(look.seconds, 10.0)
        while True:
            found = listing(self._root, look.wanted, with_checkpoints=look.with_checkpoints)
            if found != last or time.monotonic() >= deadline or not is_joined():
                return found
            time.sleep(_LOOK_SECONDS)

    def _answer(self, request: Request, incarnation: str, is_joined: Callable[[], bool]) -> Answer:
        self._check()
        if isinstance(request, ReadRange):
            self._refuse_unless(may_read(request.path), request.path)
            return FileRange(read_piece(self._root / request.path, request.offset))
        if isinstance(request, Put):
            self._refuse_unless(may_put(request.path), request.path)
            self._put(self._root / request.path, request)
        elif isinstance(request, Append):
            self._refuse_unless(may_append(request.path), request.path)
            self._append(request, incarnation)
        elif isinstance(request, AskStaged):
            return self._staged(request)
        elif isinstance(request, PutPiece):
            self._refuse_unless(may_stage(request.folder, [request.file]), request.folder)
            path = self._staging(request.folder) / request.file
            if request.offset > size_of(path):
                raise CorruptStateError(f"{path}: a range is missing before {request.offset}")
            write_piece(path, request.offset, request.content)
        elif isinstance(request, Finish):
            self._finish(request, is_joined)
        elif isinstance(request, Delete):
            self._refuse_unless(may_delete(request.path), request.path)
            self._delete(request.path)
        return Done()

    def _refuse_unless(self, is_allowed: bool, path: str) -> None:
        if not is_allowed:
            raise ProtocolError(f"{path!r} is not for a node")

    def _put(self, path: Path, request: Put) -> None:
        """A file appears whole, also one that comes in several pieces."""
        part = path.with_name(f".{path.name}.part")
        if request.offset or not request.is_last:
            if request.offset > size_of(part):
                raise CorruptStateError(f"{path}: a range is missing before {request.offset}")
            write_piece(part, request.offset, request.content)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if request.offset and request.is_last:
                part.replace(path)
            elif request.is_last:
                write_atomically(path, request.content, mode=0o600)
        except OSError as error:
            raise storage_error(error, path, needed_bytes=len(request.content)) from error

    def _append(self, request: Append, incarnation: str) -> None:
        """What is there already of it, after an answer that was lost, does not come twice."""
        key, path = (incarnation, request.path), self._root / request.path
        with self._lock:
            known = self._grown.get(key, 0)
            if request.offset > known:
                raise CorruptStateError(f"{path}: what came before {request.offset} is missing")
            fresh = request.content[known - request.offset :]
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                descriptor = os.open(path, flags, 0o600)
                try:
                    append_whole(descriptor, fresh)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise storage_error(error, path, needed_bytes=len(fresh)) from error
            self._grown[key] = known + len(fresh)

    # ------------------------------------------------------------------ folders

    def _staging(self, folder: str) -> Path:
        """Where its files wait: the trainer's part of a checkpoint in the place itself, since
        several ranks put theirs there."""
        path = self._root / folder
        return path if folder.startswith("checkpoints/") else staging_path(path, self._term())

    def _staged(self, request: AskStaged) -> Staged:
        self._refuse_unless(may_stage(request.folder, list(request.files)), request.folder)
        target, staging = self._root / request.folder, self._staging(request.folder)
        is_there = target != staging and _is_same(target, request.files)
        if _VERSION.fullmatch(request.folder) and not is_there:
            self._delete_void()
        sizes = {name: size_of(staging / name) for name in request.files}
        return Staged(sizes, is_there)

    def _delete_void(self) -> None:
        """Versions of older terms, which no engine of this one serves, give way."""
        for folder in (self._root / "weights").glob("version_*"):
            with contextlib.suppress(CorruptStateError, ConfigError):
                if open_sealed(folder, _Label).label.term < self._term():
                    discard(folder, self._term(), self._files)

    def _finish(self, request: Finish, is_joined: Callable[[], bool]) -> None:
        self._refuse_unless(may_stage(request.folder, list(request.files)), request.folder)
        target, staging = self._root / request.folder, self._staging(request.folder)
        if target != staging and _is_same(target, request.files):
            return
        for name, entry in request.files.items():
            found = file_entry(staging / name, "crc32")
            if (found.bytes, found.crc32) != (entry.bytes, entry.crc32):
                (staging / name).unlink(missing_ok=True)
                raise StorageError(f"{staging / name} arrived damaged, and is asked for again")
        if target == staging:
            for name in request.files:
                self._files.sync(staging / name)
            self._files.sync(staging)
            return

        def check() -> None:
            self._check()
            if not is_joined():
                raise FencedError(f"{target} comes from a node that was given up meanwhile")

        with self._placing:
            if _is_same(target, request.files):
                return  # As an earlier request asked, whose answer came too late.
            check()
            if target.exists():
                discard(target, self._term(), self._files)
            put_in_place(staging, target, self._files, before_rename=check)

    def _delete(self, path: str) -> None:
        target = self._root / path
        if target.is_dir():
            discard(target, self._term(), self._files)
        else:
            target.unlink(missing_ok=True)


def _is_same(folder: Path, files: Entries) -> bool:
    """Whether a folder holds these files: by its manifest, or else by every byte."""
    if not folder.is_dir():
        return False
    try:
        if MANIFEST_NAME in files:
            manifest = file_entry(folder / MANIFEST_NAME)
            return manifest == files[MANIFEST_NAME]
        return {name: file_entry(folder / name) for name in files} == dict(files)
    except (CorruptStateError, OSError):
        return False

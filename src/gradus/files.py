"""Files that survive a crash: atomic writes, the order of syncs, digests, and disks that fill up.

A file is durable after a sync of it, and its name after a sync of its folder. Each operation leaves
the disk as it was or as it should be; callers plan for a crash between two of them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from gradus.errors import (
    CorruptStateError,
    FullDiskError,
    RunDirectoryError,
    StorageError,
    UnwritableError,
)
from gradus.heartbeat import beat, touch_alive
from gradus.log import get_logger

PASSING_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.EINTR})
"""Errors of network disks that another try may not meet."""

FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that end when somebody makes room."""

UNWRITABLE_ERRORS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Errors that end when somebody gives the right to write back."""

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})

DISK_ERRORS = PASSING_ERRORS | FULL_DISK_ERRORS | {errno.EROFS, errno.EFBIG}
"""Errors for which the disk is to blame, and neither gradus nor what the user wrote."""

FULL_DISK_SECONDS = 480.0
"""How long each file waits for room; less than the other ranks wait for rank 0."""
FULL_DISK_PAUSE_SECONDS = 5.0

_LOG = get_logger(__name__)
_TRIES = 3
_PAUSE_SECONDS = 0.1
_BLOCK_BYTES = 1 << 20
_HASHING_THREADS = 4


class DurableFiles:
    """The disk operations whose order decides what survives a crash; tests replace the object.

    Each raises StorageError with path and free space.
    """

    folder_mode = 0o700
    file_mode = 0o600

    def make_folder(self, folder: Path) -> None:
        make = partial(folder.mkdir, mode=self.folder_mode, parents=True, exist_ok=True)
        self._attempt(make, folder, tries=_TRIES)

    def write(self, path: Path, content: bytes) -> None:
        """Make a new file with `content`, durable to the last byte; refuses an existing one."""
        create = partial(_create, path, content, self.file_mode, is_durable=True)
        self._attempt(create, path, needed_bytes=len(content))

    def write_by(self, path: Path, writer: Callable[[Path], None], *, num_bytes: int) -> None:
        """Let `writer` make the file `path`, and make it durable."""
        self.stage_by(path, writer, num_bytes=num_bytes)
        self.sync(path)

    def stage(self, path: Path, content: bytes) -> None:
        """As `write`, for a folder that is sealed later: the seal makes all its files durable."""
        create = partial(_create, path, content, self.file_mode, is_durable=False)
        self._attempt(create, path, needed_bytes=len(content))

    def stage_by(self, path: Path, writer: Callable[[Path], None], *, num_bytes: int) -> None:
        """As `write_by`, for a folder that is sealed later."""
        self._attempt(partial(writer, path), path, needed_bytes=num_bytes)

    def sync(self, path: Path) -> None:
        """Make the content of a file, or the names in a folder, durable."""
        try:
            # A folder of a run may lie on another disk, behind a link.
            flags = os.O_RDONLY if path.is_dir() else os.O_RDONLY | os.O_NOFOLLOW
            descriptor = os.open(path, flags)
            try:
                # Never tried again: after a failed sync the system may have dropped the pages,
                # and a second one would report success for data that is lost.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_error(error, path) from error

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, in one step; refuses one that holds something."""
        self._attempt(partial(_rename, source, target), target, tries=_TRIES)

    def delete(self, folder: Path) -> None:
        """Delete a folder with everything in it; one that is gone already is fine."""
        self._attempt(partial(_delete, folder), folder)

    def _attempt(
        self,
        action: Callable[[], object],
        path: Path,
        *,
        needed_bytes: int | None = None,
        tries: int = 1,
    ) -> None:
        """Run `action`, and again after an error that may pass, `tries` times in all."""
        beat(f"the disk: {path.name}")
        for tries_left in reversed(range(tries)):
            try:
                action()
                return
            except OSError as error:
                if tries_left == 0 or error.errno not in PASSING_ERRORS:
                    raise storage_error(error, path, needed_bytes=needed_bytes) from error
                time.sleep(_PAUSE_SECONDS)


class PatientFiles(DurableFiles):
    """Files that others may read; a full disk holds the caller until somebody makes room.

    FullDiskError when there is no room after FULL_DISK_SECONDS.
    """

    folder_mode = 0o777
    file_mode = 0o666

    def _attempt(
        self,
        action: Callable[[], object],
        path: Path,
        *,
        needed_bytes: int | None = None,
        tries: int = 1,
    ) -> None:
        deadline = time.monotonic() + FULL_DISK_SECONDS
        while True:
            try:
                super()._attempt(action, path, needed_bytes=needed_bytes, tries=tries)
                return
            except FullDiskError as error:
                if time.monotonic() >= deadline:
                    raise
                _LOG.warning("waiting for room: %s", error)
            time.sleep(FULL_DISK_PAUSE_SECONDS)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def unlinked(path: str, flags: int) -> int:
    """An `opener` of `open` that refuses a link: a file of a run is the file itself."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Make `path` hold `content`, whole or not at all, also after a power cut."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False).encode(), mode=mode)


def take_lock(file: int, folder: Path) -> None:
    """Lock an open file of `folder` at once.

    BlockingIOError while another holds it, RunDirectoryError where the disk keeps no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise RunDirectoryError(
            f"the disk of {folder} keeps no locks ({error.strerror}), which tell who writes there; "
            "mount it with flock, or name another folder (output_dir)"
        ) from None


def add_line(path: Path, line: str) -> None:
    """Append a line to a log, as far as the disk takes it; whoever says it has another log too."""
    with suppress(OSError), open(path, "a", encoding="utf-8", opener=unlinked) as file:
        file.write(f"{line}\n")


def remove(path: Path) -> None:
    """Remove a folder with everything in it, or a file; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_json(path: Path, *, tries: int = _TRIES) -> Any:
    """The JSON value in `path`; CorruptStateError when it does not parse."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        if tries == 1 or error.errno not in PASSING_ERRORS:
            raise
        time.sleep(_PAUSE_SECONDS)
        return read_json(path, tries=tries - 1)
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(f"{path} is not JSON ({error}); delete it or restore it") from error


def append_whole(descriptor: int, content: bytes) -> None:
    """Append to a file that was opened with O_APPEND: all of it, or nothing and an OSError.

    A disk that fills up in the middle takes the first bytes of a record; left there, they would
    swallow the next one.
    """
    size = os.fstat(descriptor).st_size
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class PatientLines:
    """Appends lines to a file that was opened with O_APPEND, each whole. What the disk does not
    take waits in memory and comes first as soon as it does."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, line: bytes) -> None:
        """OSError when the disk does not take it now."""
        self._waiting.append(line)
        self.flush()

    def flush(self) -> None:
        """Write what waits; OSError when something still does."""
        with self._lock:
            while self._waiting:
                append_whole(self._descriptor, self._waiting[0])
                self._waiting.popleft()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            touch_alive()
    return digest.hexdigest()


def file_digests(paths: Sequence[Path]) -> list[str]:
    return list(threads(_HASHING_THREADS).map(file_digest, paths))


def started_threads(number: int) -> ThreadPoolExecutor:
    """Threads that run already: CPython waits without end for one that finds no memory to start."""
    pool, all_run = ThreadPoolExecutor(number), threading.Barrier(number)
    for _ in range(number):
        pool.submit(all_run.wait)
    return pool


threads = cache(started_threads)
"""The same ones each time; what they do must not wait for more of them."""
os.register_at_fork(after_in_child=threads.cache_clear)


def storage_error(error: OSError, path: Path, *, needed_bytes: int | None = None) -> StorageError:
    """The error of a disk with what a person needs: path, reason, bytes needed and free."""
    free = free_bytes(path)
    needed = "" if needed_bytes is None else f", {needed_bytes:,} bytes needed"
    space = "" if free is None else f", {free:,} bytes free"
    reason = error.strerror or str(error) or type(error).__name__
    kind, advice = StorageError, "make room or look at the disk"
    if error.errno in FULL_DISK_ERRORS:
        kind = FullDiskError
    elif error.errno in UNWRITABLE_ERRORS:
        kind, advice = UnwritableError, "make it writable for this user again"
    elif error.errno == errno.EFBIG:
        advice = "raise what a file may hold: see `ulimit -f`, or choose another disk"
    return kind(f"cannot keep {path}: {reason}{needed}{space}; {advice}")


def free_bytes(path: Path) -> int | None:
    """Free bytes on the disk of `path`, or of its nearest existing parent; None if unknown."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _create(path: Path, content: bytes, mode: int, *, is_durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        # Half a file would be in the way of the next try.
        path.unlink(missing_ok=True)
        raise


def _rename(source: Path, target: Path) -> None:
    if target.exists() and not source.exists():
        return  # The try before this one got through, and only its answer was lost.
    source.rename(target)


def _delete(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)

"""The disk operations whose order decides what survives a crash, in one object that tests replace.

A write is durable after `write` or `sync`; a name after `sync` of its folder. Each operation leaves
the disk as it was or as it should be, and a crash between two of them is a case that callers plan.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradus.errors import CorruptStateError, StorageError
from gradus.log import get_logger

PASSING_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.EINTR})
"""Errors of network disks that another try may not meet."""

FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that end when somebody makes room."""

DISK_ERRORS = PASSING_ERRORS | FULL_DISK_ERRORS | {errno.EROFS}
"""Errors for which the disk is to blame, and neither gradus nor what the user wrote."""

_LOG = get_logger(__name__)
_TRIES = 3
_PAUSE_SECONDS = 0.1


class DurableFiles:
    """The operations of checkpoints on disk; each raises StorageError with path and free space.

    >>> DurableFiles().write(Path("state.json"), b"{}")  # doctest: +SKIP
    """

    def make_folder(self, folder: Path) -> None:
        """Create `folder` and its parents; an existing one is fine."""
        _again(lambda: folder.mkdir(mode=0o700, parents=True, exist_ok=True), folder)

    def write(self, path: Path, content: bytes) -> None:
        """Make a new file with `content`, durable to the last byte; refuses an existing one."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(error, path, needed_bytes=len(content)) from error

    def write_by(self, path: Path, writer: Callable[[Path], None], *, num_bytes: int) -> None:
        """Let `writer` make the file `path`, and make it durable."""
        try:
            writer(path)
        except OSError as error:
            raise storage_error(error, path, needed_bytes=num_bytes) from error
        self.sync(path)

    def sync(self, path: Path) -> None:
        """Make the content of a file, or the names in a folder, durable."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
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
        _again(lambda: _rename_once(source, target), target)

    def delete(self, folder: Path) -> None:
        """Delete a folder with everything in it; one that is gone already is fine."""
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, folder) from error


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


def write_when_there_is_room(
    write: Callable[[], None], path: Path, *, seconds: float, pause_seconds: float
) -> None:
    """Run `write`, and again while the disk of `path` is full; any other error goes through.

    `write` must start anew each time. OSError when there is no room after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in FULL_DISK_ERRORS or time.monotonic() >= deadline:
                raise
            _LOG.warning("waiting for room: %s", storage_error(error, path))
        time.sleep(pause_seconds)


def storage_error(error: OSError, path: Path, *, needed_bytes: int | None = None) -> StorageError:
    """The error of a disk with what a person needs: path, reason, bytes needed and free."""
    free = free_bytes(path)
    needed = "" if needed_bytes is None else f", {needed_bytes:,} bytes needed"
    space = "" if free is None else f", {free:,} bytes free"
    reason = error.strerror or str(error) or type(error).__name__
    return StorageError(
        f"cannot keep {path}: {reason}{needed}{space}; make room or look at the disk"
    )


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


def _rename_once(source: Path, target: Path) -> None:
    if target.exists() and not source.exists():
        return  # The try before this one got through, and only its answer was lost.
    source.rename(target)


def _again(action: Callable[[], None], path: Path) -> None:
    """Run `action`, and again after an error that may pass."""
    for tries_left in reversed(range(_TRIES)):
        try:
            action()
            return
        except OSError as error:
            if tries_left == 0 or error.errno not in PASSING_ERRORS:
                raise storage_error(error, path) from error
            time.sleep(_PAUSE_SECONDS)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Make `path` hold `content`, whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Write `value` as JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False).encode(), mode=mode)


def read_json(path: Path) -> Any:
    """The JSON value in `path`; CorruptStateError when it does not parse."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(f"{path} is not JSON ({error}); delete it or restore it") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

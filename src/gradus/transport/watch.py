"""Waiting until something changes in a folder, without looking all the time.

Linux reports changes through inotify at once and at no cost in between. It does not see changes
that another host makes on a network file system, so a wait also ends after FALLBACK_SECONDS, or
after POLL_SECONDS where there is no inotify.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import time
import weakref
from pathlib import Path

FALLBACK_SECONDS = 0.1
"""Longest wait where inotify works."""

POLL_SECONDS = 0.008
"""Longest wait where it does not."""

_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80


class FolderWatch:
    """Wakes one process when a file or folder appears directly inside one of `folders`.

    >>> watch = FolderWatch(Path("."))
    >>> watch.wait(0.001)
    """

    def __init__(self, *folders: Path) -> None:
        self._descriptor = _open_inotify(folders)
        self._close = weakref.finalize(self, _close_descriptor, self._descriptor)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._longest = FALLBACK_SECONDS if self._descriptor is not None else POLL_SECONDS

    def wait(self, timeout_seconds: float) -> None:
        """Block until something may have changed; look again after every return."""
        timeout = max(0.0, min(timeout_seconds, self._longest))
        if self._descriptor is None:
            time.sleep(timeout)
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(1000 * timeout):
            self._drain()

    async def wait_async(self) -> None:
        """Let the event loop run until something may have changed."""
        if self._descriptor is None:
            await asyncio.sleep(self._longest)
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._note_change)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), self._longest)
        self._changed.clear()

    def close(self) -> None:
        """Give the descriptor back; twice is harmless."""
        if self._loop is not None and self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop = None
        self._close()
        self._descriptor = None
        self._longest = POLL_SECONDS

    def _note_change(self) -> None:
        self._drain()
        self._changed.set()

    def _drain(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 1 << 16)


def _open_inotify(folders: tuple[Path, ...]) -> int | None:
    """A descriptor that is readable after a change; None where the system has none to give."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, AttributeError):
        return None
    if descriptor < 0:
        return None
    for folder in folders:
        watched = libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO)
        if watched < 0:
            os.close(descriptor)
            return None
    return descriptor


def _close_descriptor(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)

"""Signs of life: what the work of this process did last, in a small file that the launcher reads.

Only the thread that works beats, so that a thread which lives on cannot hide work that hangs. A
sign costs microseconds: the file is overwritten in place and never synced.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

BEAT_SECONDS = 5.0
"""Between two signs of life of what only waits."""
DISK_SECONDS = 1800.0
"""How long a file of a large model may take on a slow disk."""
FIRST_STEP_SECONDS = 900.0
"""How long each of the first micro batches may take, in which kernels are compiled and chosen."""
ALIVE_VARIABLE = "GRADUS_ALIVE"
"""Names a file on this machine that a launcher, or a node side, touches while it watches its
processes, for whoever started it and ends what hangs."""
STRANDS = "strands"
"""Below the folder of heartbeats: those of threads, and of ranks beside the first."""


@dataclass
class Sign:
    """What the file says."""

    pid: int
    number: int = 0
    """Grows with each sign of life."""
    last: str = ""
    """What the work did last."""
    step: int | None = None
    seconds: float | None = 0.0
    """How long this silence may last where that is longer than the launch allows; None means for
    ever: nothing is to be done."""
    silent: dict[str, str] = field(default_factory=dict)
    """Others who are silent as far as this process knows, and what each does."""


class Heartbeat:
    """Owns the sign of one strand of work: of a role's main thread, or of one that works beside it.

    Without a path, as in a process that was started by hand, it says nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.sign = Sign(os.getpid())
        self._thread = 0
        self._file: int | None = None
        self._size = 0

    def strand(self, name: str) -> Heartbeat:
        """That of a strand beside this one."""
        if self.path is None:
            return Heartbeat()
        folder = self.path.parent
        folder = folder if folder.name == STRANDS else folder / STRANDS
        return Heartbeat(folder / f"{self.path.stem}.{name}.json")

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Within this block the signs of the calling thread are those of this strand."""
        token, self._thread = _CURRENT.set(self), threading.get_ident()
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextmanager
    def working(self, last: str, seconds: float) -> Iterator[None]:
        """Work of a strand that rests before and after; see `busy`."""
        with self.beating():
            self.say(last, seconds)
            try:
                yield
            finally:
                self.say(f"after {last}", None)

    def say(self, last: str, seconds: float | None) -> None:
        """Count one sign of life more."""
        # What a thread does for this one on its behalf says nothing of this one.
        if self.path is None or threading.get_ident() != self._thread:
            return
        sign = self.sign
        sign.number += 1
        sign.last, sign.seconds = last, seconds
        try:
            self._write(self.path, json.dumps(vars(sign)).encode())
        except OSError:
            return  # A disk that takes nothing must not end the process; it is silent then.

    def _write(self, path: Path, content: bytes) -> None:
        if self._file is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
        # Blanks hide the end of a longer sign; a mapped file would crash on a full disk.
        os.pwrite(self._file, content.ljust(self._size), 0)
        self._size = max(self._size, len(content))


def touch_alive() -> None:
    """The sign of a launcher or a node side; nothing where nobody asked for it."""
    if path := os.environ.get(ALIVE_VARIABLE):
        with suppress(OSError):
            Path(path).touch()


_NOWHERE = Heartbeat()
_CURRENT: ContextVar[Heartbeat] = ContextVar("heartbeat", default=_NOWHERE)


def strand(name: str) -> Heartbeat:
    """For a thread that will work beside this one."""
    return _CURRENT.get().strand(name)


def beat(last: str, *, step: int | None = None, silent: Mapping[str, str] | None = None) -> None:
    """Say that this thread's work moves, and what it does now.

    `step` and `silent` stay until others are given.
    """
    heartbeat = _CURRENT.get()
    if step is not None:
        heartbeat.sign.step = step
    if silent is not None:
        heartbeat.sign.silent = dict(silent)
    heartbeat.say(last, heartbeat.sign.seconds)


@contextmanager
def busy(last: str, seconds: float) -> Iterator[None]:
    """Announce long work that is no hang: in this block each silence may last `seconds`.

    >>> with busy("saving a checkpoint", seconds=600):
    ...     pass
    """
    heartbeat = _CURRENT.get()
    before = heartbeat.sign.seconds
    heartbeat.say(last, seconds)
    try:
        yield
    finally:
        heartbeat.say(f"after {last}", before)

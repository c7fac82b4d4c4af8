"""Who blocks the event loop of an environment process, and for how long it may.

A plain function runs in a thread, so what blocks is an `async def` that computes, sleeps or asks
without `await`. It is named soon. After its deadline the process ends under its name, and the
launcher starts another.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import gradus
from gradus.environments.verifiers.exits import hook_name, scored
from gradus.errors import ExitCode
from gradus.log import get_logger

TELL_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_OURS = str(Path(gradus.__file__).parent)
_LIBRARIES = tuple(
    dict.fromkeys(sysconfig.get_path(it) for it in ("stdlib", "platstdlib", "purelib", "platlib"))
)

log = get_logger(__name__)


@dataclass(frozen=True)
class BlockedFor:
    """How long code of the environment may keep its event loop."""

    scoring: float = 120.0
    """A reward, a metric or a judge: the longest `agent.timeout.scoring`."""
    episode: float = 900.0
    """Anything else: `timeout.episode_seconds`."""


@dataclass(frozen=True)
class Blocker:
    """What runs in the event loop's thread."""

    text: str
    is_scoring: bool

    @classmethod
    def in_frame(cls, frame: FrameType | None) -> Blocker:
        """The innermost line that is no library's, and the hook that it belongs to."""
        frames = list(_frames(frame))
        own = [it for it in frames if not it.f_code.co_filename.startswith((*_LIBRARIES, _OURS))]
        place = ""
        if found := (own or frames)[:1]:
            code = found[0].f_code
            place = f"{Path(code.co_filename).name}:{found[0].f_lineno} in {code.co_qualname}"
        hooks = [it.f_locals["function"] for it in frames if it.f_code is scored.__code__]
        who = f"{hook_name(hooks[0])}, " if hooks else ""
        return cls(f"{who}{place}", bool(hooks))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class LoopWatch:
    """Owns the thread that watches the event loop of this thread."""

    def __init__(
        self, limits: BlockedFor, *, source: str, look_seconds: float = _LOOK_SECONDS
    ) -> None:
        self._limits = limits
        self._source = source
        self._look_seconds = look_seconds
        self._alive_at = time.monotonic()
        self._told_seconds = 0.0
        self._loop_thread = threading.get_ident()
        self._closed = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Must be entered inside the running event loop."""
        beating = asyncio.create_task(self._beat())
        thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closed.set()
            thread.join()
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            await asyncio.sleep(self._look_seconds)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(self._look_seconds):
            now = time.monotonic()
            if now - looked_at > 2 * self._look_seconds + 1.0:
                self._alive_at += now - looked_at  # the whole process was stopped
            looked_at = now
            blocked = now - self._alive_at - self._look_seconds
            if blocked < TELL_SECONDS:
                self._told_seconds = 0.0
                continue
            blocker = Blocker.in_frame(sys._current_frames().get(self._loop_thread))
            limit = self._limits.scoring if blocker.is_scoring else self._limits.episode
            if blocked >= min(limit, self._limits.episode):
                self._end(blocker, blocked, limit)
            if blocked >= 3 * self._told_seconds:
                self._told_seconds = blocked
                log.warning(
                    "%s has blocked the event loop for %.0f s, and no other episode of this "
                    "process moves: leave `async` out, or use `await`",
                    blocker.text,
                    blocked,
                )

    def _end(self, blocker: Blocker, seconds: float, limit: float) -> Any:
        key = "agent.timeout.scoring" if blocker.is_scoring else "timeout.episode_seconds"
        log.error(
            "gradus env-server: source %r: %s has blocked the event loop for %.0f s, longer than "
            "%s = %g allows; the episodes of this process are lost. Leave `async` out, then it "
            "runs in a thread, or use `await`",
            self._source,
            blocker.text,
            seconds,
            key,
            limit,
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(ExitCode.INTERNAL)

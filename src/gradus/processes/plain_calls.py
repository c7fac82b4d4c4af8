"""Where functions of users run that were written without `async`: in threads, so that a slow one
keeps nothing else waiting.

A process has one `PlainCalls`, which says how many run at once. A function that only works in the
main thread, as one that sets a signal or has a connection that was opened there, says so by its
error in a thread; it runs in the main thread then, as do its later calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradus.log import get_logger

USUAL_PLACES = 32
SLOW_SECONDS = 1.0
"""A call that takes longer is told of, and again when one takes twice as long."""
MOST_LEFT = 256
"""Threads that may outlive their deadline beside those with places; more keep their places."""

log = get_logger(__name__)


class _NeedsMainThread(BaseException):
    """What a function does that only works there. No `Exception`, which functions often catch."""


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    is_left: bool = False
    """Whether nobody waits for it any more, and its place is another's."""


class PlainCalls:
    """Owns the threads in which plain functions run, as many at once as there are places.

    >>> calls = PlainCalls(8)
    >>> asyncio.run(calls.run(lambda: 1 + 2, "add"))
    3
    """

    def __init__(self, places: int = USUAL_PLACES) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._num_running = 0
        self._num_left = 0
        self._told_seconds: dict[str, float] = {}
        self._bound_to_main: set[str] = set()

    async def run(self, work: Callable[[], Any], name: str) -> Any:
        """What a plain function gives; `name` says in messages who it is.

        Where it is cancelled, by a deadline for example, its thread goes on and its place is free.
        """
        if name in self._bound_to_main:
            return work()
        started = time.monotonic()
        try:
            given = await self._in_thread(work)
        except asyncio.CancelledError:
            seconds = time.monotonic() - started
            if seconds > SLOW_SECONDS:
                log.warning("%s was given up after %.1f s; its thread goes on", name, seconds)
            raise
        except (_NeedsMainThread, Exception) as error:
            if not isinstance(error, _NeedsMainThread) and "thread" not in str(error).lower():
                raise
            given = work()
            self._bound_to_main.add(name)
            log.warning(
                "%s works in the main thread alone (%s): the other episodes of this process wait "
                "while it runs",
                name,
                error,
            )
            return given
        self._tell(name, time.monotonic() - started)
        return given

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        call = _Call(partial(contextvars.copy_context().run, work))
        with self._lock:
            if has_place := self._num_running < self._places:
                self._num_running += 1
            else:
                self._waiting.append(call)
        if has_place:
            self._start(call)
        try:
            return await asyncio.wrap_future(call.result)
        except asyncio.CancelledError:
            self._leave(call)
            raise

    def _start(self, call: _Call) -> None:
        threading.Thread(target=self._work, args=(call,), name="plain-call", daemon=True).start()

    def _work(self, call: _Call | None) -> None:
        """The thread: one call after the other, until none waits or its place is another's."""
        while call is not None:
            if call.result.set_running_or_notify_cancel():
                _finish(call)
            with self._lock:
                if call.is_left:
                    self._num_left -= 1
                    return
                call = self._waiting.popleft() if self._waiting else None
                self._num_running -= call is None

    def _leave(self, call: _Call) -> None:
        """Nobody waits for a call: give its place to the next one."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
                return
            if call.result.done() or self._num_left >= MOST_LEFT:
                return
            call.is_left = True
            self._num_left += 1
            following = self._waiting.popleft() if self._waiting else None
            self._num_running -= following is None
        if following is not None:
            self._start(following)

    def _tell(self, name: str, seconds: float) -> None:
        if seconds > max(SLOW_SECONDS, 2 * self._told_seconds.get(name, 0.0)):
            self._told_seconds[name] = seconds
            log.info("%s takes %.1f s; up to %d run at once", name, seconds, self._places)


def _finish(call: _Call) -> None:
    try:
        given = call.work()
    except StopIteration as error:  # which no future takes
        raised = RuntimeError(f"StopIteration: {error}")
        raised.__cause__ = error
        call.result.set_exception(raised)
    except BaseException as error:
        call.result.set_exception(error)
    else:
        call.result.set_result(given)


_OF_PROCESS: contextvars.ContextVar[PlainCalls | None] = contextvars.ContextVar(
    "plain_calls", default=None
)


def use_plain_calls(calls: PlainCalls) -> None:
    """Let this context, and what it starts, run plain functions there; a signal that one sets says
    that it needs the main thread."""
    _OF_PROCESS.set(calls)
    given: Any = signal.signal

    def set_signal(number: Any, handler: Any) -> Any:
        if threading.current_thread().name == "plain-call":
            raise _NeedsMainThread("it sets a signal")
        return given(number, handler)

    vars(signal)["signal"] = set_signal


async def call(function: Callable[..., Any], work: Callable[[], Any], name: str) -> Any:
    """What `work`, a call of a user's function, gives: of an `async def` in this event loop, of any
    other in a thread, unless this process has none. `name` says in messages who it is."""
    calls = _OF_PROCESS.get()
    given = work() if calls is None or _is_async(function) else await calls.run(work, name)
    return await given if inspect.isawaitable(given) else given


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )

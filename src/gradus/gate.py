"""The one gate for plug-ins: what calls a plug-in does so inside `guarded`, and in an event loop
that plug-ins may block, a `BlockWatch` runs beside it.

Whatever a plug-in raises leaves the gate as `PluginFailed` under the name of its class; only errors
of gradus, and a cancellation that gradus itself asked for, pass.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Self

from gradus.errors import GradusError

CALL_SECONDS = 60.0
"""How long a plug-in may block its thread where no setting says more."""
TELL_SECONDS = 10.0
"""After so long a warning names the plug-in that blocks the event loop."""
_AGAIN_SECONDS = 2.0
"""Until a plug-in that has swallowed its interruption gets another; its own clean-up takes time."""
_OWN_TASK = "it cancelled the task that it runs in"
_SIGNAL = signal.SIGRTMIN + 7
"""Nothing else uses it; plug-ins often set SIGALRM, and so do timeouts of tests."""


class PluginFailed(Exception):
    """What a plug-in did wrong, under the name of its class, with the line of its code."""

    def __init__(self, plugin: str, cause: BaseException) -> None:
        super().__init__(f"{plugin}: {_said(cause)}")
        self.cause = cause

    @property
    def is_late(self) -> bool:
        return isinstance(self.cause, PluginLate)


class CtrlC(KeyboardInterrupt):
    """The real one inside `interruptible`; a plug-in may raise a KeyboardInterrupt itself."""


class PluginLate(BaseException):
    """A plug-in blocked its thread for too long. No `Exception`, which plug-ins often catch."""


@dataclass(eq=False)
class _Call:
    """A plug-in that runs."""

    name: Callable[[], str]
    seconds: float
    ends_at: float
    is_over: bool = False
    """Whether the plug-in has returned or raised: what follows is ours."""
    waits: bool = False
    """Whether it is awaited, so that others may cancel it meanwhile."""


_CALL: ContextVar[_Call | None] = ContextVar("gradus_plugin_call", default=None)
"""The innermost call of a plug-in; what a plug-in starts inherits it."""


def plugin_name(kind: str, plugin: object) -> str:
    """The kind of a plug-in and its class, for messages.

    >>> plugin_name("loss", "text")
    'loss builtins:str'
    """
    found = plugin if isinstance(plugin, type | FunctionType) else type(plugin)
    return f"{kind} {found.__module__}:{found.__qualname__}"


def is_ours(plugin: object) -> bool:
    """Whether its class comes with gradus, so that its inputs need no watching."""
    return type(plugin).__module__.startswith("gradus.")


@contextmanager
def guarded(name: Callable[[], str], *, seconds: float = CALL_SECONDS) -> Iterator[None]:
    """PluginFailed for everything that a plug-in raises here, SystemExit and a cancellation that it
    makes up included. `name` says who it is and where it stands; it is asked only for a message.

        >>> with guarded(lambda: "filter mine:Short, source 'words'"):
        ...     pass
    """
    task = current_task()
    asked_before = task.cancelling() if task else 0
    call = _Call(name, seconds, time.monotonic() + seconds)
    token = _CALL.set(call)
    try:
        yield
        if task and not call.waits:
            _refuse_stop(task)
            if _taken_back(task, asked_before):
                raise asyncio.CancelledError(_OWN_TASK)
    except BaseException as error:
        call.is_over = True
        if isinstance(error, GradusError | PluginFailed | CtrlC):
            raise
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled and task is not None and task.cancelling() > asked_before:
            raise
        raise PluginFailed(name(), _first(error)) from error
    finally:
        call.is_over = True
        _CALL.reset(token)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the body even while a plug-in runs in `guarded`; main thread only.

    >>> with interruptible():
    ...     pass
    """

    def interrupt(*_: object) -> None:
        raise CtrlC

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Awaited:
    """Awaits what a plug-in gave inside `guarded`, where its code may cancel the task that it runs
    in: what is asked for in its own steps, between two waits, is taken back and blamed on it.

        await Awaited(judge.score_group(episodes, context))
    """

    def __init__(self, given: Awaitable[object]) -> None:
        self._given = given

    def __await__(self) -> Generator[Any, Any, None]:
        task, call = current_task(), _CALL.get()
        assert task is not None
        assert call is not None
        call.waits = True
        steps = self._given.__await__()
        go_on: Callable[[], Any] = partial(next, steps)
        while True:
            asked_before = task.cancelling()
            try:
                waits_for = go_on()
            except StopIteration:
                break
            finally:
                is_own = _taken_back(task, asked_before)
                _refuse_stop(task)
            try:
                go_on = partial(steps.send, (yield waits_for))
            except BaseException as error:
                go_on = partial(steps.throw, error)
        if is_own:
            with suppress(asyncio.CancelledError):
                yield  # Here the cancellation arrives.
            raise asyncio.CancelledError(_OWN_TASK)


class BlockWatch:
    """Watches the event loop of the main thread, from a thread, for plug-ins that block it.

    One that blocks for `TELL_SECONDS` is named in a warning, and one that takes longer than its
    call may is interrupted, also inside `time.sleep` or a read. Compiled code that neither returns
    nor looks at signals cannot be; then the warning gives the place, and the launcher ends a
    process that stays silent.

        async with BlockWatch(print):
            ...
    """

    def __init__(self, tell: Callable[[str], None], *, look_seconds: float = 1.0) -> None:
        self._tell = tell
        self._look_seconds = look_seconds
        self._alive_at = time.monotonic()
        self._is_told = False
        self._closed = threading.Event()
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._watch, name="block-watch", daemon=True)

    async def __aenter__(self) -> Self:
        if threading.current_thread() is self._main:
            self._before: Any = signal.signal(_SIGNAL, self._look)
            self._beating = asyncio.create_task(self._beat())
            self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if threading.current_thread() is self._main:
            self._closed.set()
            self._thread.join()
            self._beating.cancel()
            signal.signal(_SIGNAL, self._before)

    async def _beat(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            self._is_told = False
            await asyncio.sleep(self._look_seconds / 2)

    @property
    def _blocked_seconds(self) -> float:
        return time.monotonic() - self._alive_at

    def _watch(self) -> None:
        """The thread: it only asks the main thread to look, which knows what it runs."""
        while not self._closed.wait(self._look_seconds):
            if self._blocked_seconds < self._look_seconds:
                continue
            signal.pthread_kill(self._main.ident or 0, _SIGNAL)
            if self._blocked_seconds >= TELL_SECONDS + 2 * self._look_seconds:
                self._say("something", sys._current_frames().get(self._main.ident or 0))

    def _look(self, _: int, frame: FrameType | None) -> None:
        """In the main thread, between two steps of what blocks it, and in its context."""
        call = _CALL.get()
        if call is None or call.is_over or self._blocked_seconds < self._look_seconds:
            return
        if time.monotonic() >= call.ends_at:
            call.ends_at = time.monotonic() + _AGAIN_SECONDS
            raise PluginLate(f"blocked the event loop; it may take {call.seconds:g} s for a call")
        if self._blocked_seconds >= TELL_SECONDS:
            self._say(call.name(), frame)

    def _say(self, who: str, frame: FrameType | None) -> None:
        if self._is_told or frame is None:
            return
        self._is_told = True
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        self._tell(
            f"{who} has blocked the event loop for {self._blocked_seconds:.0f} s at {place}; "
            "nothing else moves meanwhile: await, or use asyncio.to_thread"
        )


def current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _refuse_stop(task: asyncio.Task[Any]) -> None:
    """RuntimeError where the plug-in stopped the event loop, which goes on; only asyncio's own
    loop says so."""
    loop: Any = task.get_loop()
    if getattr(loop, "_stopping", False):
        loop._stopping = False
        raise RuntimeError("it stopped the event loop, which is not its own")


def _taken_back(task: asyncio.Task[Any], asked_before: int) -> bool:
    """Whether the task was asked to end since then; it is not any more."""
    asked = task.cancelling() - asked_before
    for _ in range(asked):
        task.uncancel()
    return asked > 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _said(cause: BaseException) -> str:
    """Its type and text, and where the plug-in's code stood."""
    if isinstance(cause, PluginFailed):
        return str(cause)
    try:
        text = f"{cause}"
    except Exception:
        text = "an error without a readable text"
    if isinstance(cause, asyncio.CancelledError) and not text:
        text = "something that it awaits was cancelled, or it raised this itself"
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if f.filename != __file__]
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(cause).__name__}: {text}{line}"

"""The one gate for plug-ins: what calls a plug-in does so inside `guarded`, and in an event loop
that plug-ins may block, a `BlockWatch` runs beside it.

Whatever a plug-in raises leaves the gate as `PluginFailed` under the name of its class; only errors
of gradus, and a cancellation that gradus itself asked for, pass.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Self
from weakref import WeakKeyDictionary

from gradus.errors import ExitCode, GradusError

CALL_SECONDS = 60.0
"""How long a plug-in may block its thread where no setting says more."""
TELL_SECONDS = 10.0
"""After so long a warning names the plug-in that blocks the event loop."""
_OWN_TASK = "it cancelled the task that it runs in"


class PluginFailed(Exception):
    """What a plug-in did wrong, under the name of its class, with the line of its code."""

    def __init__(self, plugin: str, cause: BaseException) -> None:
        super().__init__(f"{plugin}: {_said(cause)}")
        self.cause = cause


class CtrlC(KeyboardInterrupt):
    """The real one inside `interruptible`; a plug-in may raise a KeyboardInterrupt itself."""


@dataclass(eq=False)
class _Call:
    """A plug-in that runs."""

    name: Callable[[], str]
    seconds: float
    waits: bool = False
    """Whether it is awaited, so that others may cancel it meanwhile."""


_CALLS: WeakKeyDictionary[asyncio.Task[Any], _Call] = WeakKeyDictionary()
"""The innermost call of a plug-in in each task."""


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
    call = _Call(name, seconds)
    outer = _CALLS.get(task) if task else None
    if task:
        _CALLS[task] = call
    try:
        yield
        if task and not call.waits:
            _refuse_stop(task)
            if _taken_back(task, asked_before):
                raise asyncio.CancelledError(_OWN_TASK)
    except BaseException as error:
        if isinstance(error, GradusError | PluginFailed | CtrlC):
            raise
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled and task is not None and task.cancelling() > asked_before:
            raise
        raise PluginFailed(name(), _first(error)) from error
    finally:
        if task and outer:
            _CALLS[task] = outer
        elif task:
            del _CALLS[task]


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
        task = current_task()
        assert task is not None
        _CALLS[task].waits = True
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
    """Watches an event loop, from a thread, for plug-ins that block it.

    One that blocks for `TELL_SECONDS` is named in a warning; one that takes longer than its call
    may ends the process, and so the run.

        async with BlockWatch(print):
            ...
    """

    def __init__(self, tell: Callable[[str], None], *, look_seconds: float = 1.0) -> None:
        self._tell = tell
        self._look_seconds = look_seconds
        self._alive_at = time.monotonic()
        self._is_told = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="block-watch", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._beating = asyncio.create_task(self._beat())
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            self._is_told = False
            await asyncio.sleep(self._look_seconds / 2)

    def _watch(self) -> None:
        """Add up what each look finds. A process that was stopped, or starved, is looked at late,
        and that blames nobody; nor does a call answer for those before it."""
        looked, alive_at, blocked, of_call = time.monotonic(), self._alive_at, 0.0, 0.0
        before: _Call | None = None
        while not self._closed.wait(self._look_seconds):
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * self._look_seconds), now
            task = asyncio.current_task(self._loop)
            call = _CALLS.get(task) if task else None
            if self._alive_at != alive_at:
                alive_at, blocked, before = self._alive_at, 0.0, None
            blocked += passed
            of_call = of_call + passed if call is before else 0.0
            before = call
            if call is not None and of_call >= call.seconds:
                self._tell(f"{self._said(call, of_call)}; a call may take {call.seconds:g} s")
                os._exit(ExitCode.CONFIG)
            if blocked >= TELL_SECONDS and not self._is_told:
                self._is_told = True
                said = self._said(call, blocked)
                self._tell(f"{said}; nothing else moves meanwhile: await, or use asyncio.to_thread")

    def _said(self, call: _Call | None, seconds: float) -> str:
        who = "something" if call is None else call.name()
        frame = sys._current_frames().get(self._loop_thread)
        code = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        return f"{who} has blocked the event loop for {seconds:.0f} s{code}"


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

"""Trusted functions on untrusted input: called in a helper process, with a deadline.

A parser or an algebra system may hang, or fill the memory, on what a model wrote. `HelperCalls`
keeps a few helper processes; one that misses its deadline is killed, and the next call starts
another.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import msgspec

from gradus.errors import ProtocolError
from gradus.wire.codec import decode, encode

GIB = 1 << 30
_START_SECONDS = 120.0
_ALARM_AFTER_SECONDS = 2.0
_WALL_FACTOR = 12
"""Wall seconds for each CPU second of a deadline: on a busy machine a helper waits for its core."""
_HELPER = "import sys; from gradus_kit.sandbox.calls import serve; serve(int(sys.argv[1]))"
_MAX_MESSAGE_BYTES = 64 << 20
_HEADER = struct.Struct("<Q")


class HelperCall(msgspec.Struct, frozen=True):
    """`module:function`, its arguments, and how much CPU time it may take; 0 only import it."""

    function: str
    arguments: list[Any]
    seconds: float


class HelperAnswer(msgspec.Struct, frozen=True):
    """The value that the function returned, or the name and text of what it raised."""

    value: Any = None
    error: str = ""
    detail: str = ""


class CallFailed(Exception):
    """The call came to no value; `reason`: `deadline`, `memory`, `died` or an error's name."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.was_called = True
        """False when the function could not even be imported."""

    @property
    def is_broken(self) -> bool:
        """True if this says nothing of the arguments: the helper ended, or never got so far."""
        return self.reason == "died" or not self.was_called


class HelperCalls:
    """Calls functions in helper processes, each call alone in its helper.

    >>> calls = HelperCalls()
    >>> await calls.call("math:factorial", 5, seconds=1.0)
    120
    """

    def __init__(self, *, max_helpers: int = 1, memory_bytes: int = 4 * GIB) -> None:
        self._max_helpers = max_helpers
        self._memory_bytes = memory_bytes
        self._idle: list[_Helper] = []
        # A semaphore belongs to one event loop.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._slots = weakref.WeakKeyDictionary()

    async def call(self, function: str, *arguments: Any, seconds: float) -> Any:
        """The value of `module:function`; CallFailed when it comes to none in time.

        `seconds` of CPU time; starting a helper and importing the module do not count.
        """
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._max_helpers))
        async with slots:
            helper = self._idle.pop() if self._idle else _Helper(self._memory_bytes)
            try:
                value = await asyncio.to_thread(helper.call, function, list(arguments), seconds)
            except BaseException as error:
                if isinstance(error, CallFailed) and error.reason not in _ENDS_HELPER:
                    self._idle.append(helper)
                else:
                    helper.close()
                raise
            self._idle.append(helper)
            return value

    def close(self) -> None:
        """End the helpers that wait for a call."""
        while self._idle:
            self._idle.pop().close()


_ENDS_HELPER = {"deadline", "memory", "died"}


_HEARD_SECONDS = 1.0
"""Until the thread that reads a helper has heard of its end."""


class _Helper:
    """One helper process, seen from the caller."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._imported: set[str] = set()
        self._is_closed = False
        self._talking = threading.RLock()
        """Held by the thread that reads the pipes: a closed descriptor may be another file's."""

    def call(self, function: str, arguments: list[Any], seconds: float) -> Any:
        """Blocks; from a thread."""
        if function not in self._imported:
            try:
                self._exchange(HelperCall(function, [], 0.0), _START_SECONDS)
            except CallFailed as error:
                error.was_called = False
                raise
            self._imported.add(function)
        return self._exchange(HelperCall(function, arguments, seconds), _WALL_FACTOR * seconds)

    def _exchange(self, call: HelperCall, seconds: float) -> Any:
        try:
            message = encode(call)
        except (TypeError, ValueError) as error:
            raise CallFailed(type(error).__name__, str(error)[:200]) from None
        with self._talking:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _send(process.stdin, message)
                answer: HelperAnswer = decode(_receive(process.stdout, seconds), HelperAnswer)
            except TimeoutError:
                self.close()
                raise CallFailed(
                    "died", f"{call.function} gave no answer in {seconds:g} s"
                ) from None
            except (OSError, EOFError, ValueError) as error:
                self.close()
                if process.returncode == -signal.SIGPROF:
                    told = f"{call.function} took over {call.seconds:g} s of CPU time"
                    raise CallFailed("deadline", told) from None
                raise CallFailed("died", f"the helper of {call.function} ended: {error}") from None
        if answer.error:
            reason = "memory" if answer.error == "MemoryError" else answer.error
            raise CallFailed(reason, answer.detail)
        return answer.value

    def _started(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise CallFailed("died", "the helper was closed")
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _HELPER, str(self._memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_helper_variables(),
                start_new_session=True,
            )
            if self._is_closed:  # meanwhile
                self._process.kill()
        return self._process

    def close(self) -> None:
        """Kill the process and forget it; safe from another thread than `call`."""
        self._is_closed = True
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if not self._talking.acquire(timeout=_HEARD_SECONDS):
            return  # something that the helper started holds its pipe
        try:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        finally:
            self._talking.release()


def _helper_variables() -> dict[str, str]:
    """One thread per library; nothing of ours but what finds programs and the language."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _send(pipe: Any, message: bytes) -> None:
    pipe.write(_HEADER.pack(len(message)) + message)
    pipe.flush()


def _receive(pipe: Any, seconds: float | None) -> bytes:
    """One message; EOFError at the end, TimeoutError at the deadline."""
    ends = None if seconds is None else time.monotonic() + seconds
    [length] = _HEADER.unpack(_read_exactly(pipe.fileno(), _HEADER.size, ends))
    if length > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return _read_exactly(pipe.fileno(), length, ends)


def _read_exactly(descriptor: int, count: int, ends: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        wait = None if ends is None else max(0.0, ends - time.monotonic())
        if not select.select([descriptor], [], [], wait)[0]:
            raise TimeoutError
        block = os.read(descriptor, count - len(parts))
        if not block:
            raise EOFError("end of the pipe")
        parts += block
    return bytes(parts)


def _answer(call: HelperCall) -> HelperAnswer:
    """Call the function.

    A timer of CPU time kills this process at the deadline, and an alarm a little after the
    caller's own, also when the caller is gone and the function never returns to Python.
    """
    try:
        module, _, name = call.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        if call.seconds <= 0:
            return HelperAnswer()
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * call.seconds + _ALARM_AFTER_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, call.seconds)
        return HelperAnswer(value=function(*call.arguments))
    except RecursionError as error:
        return HelperAnswer(error="RecursionError", detail=str(error)[:200])
    except Exception as error:
        return HelperAnswer(error=type(error).__name__, detail=str(error)[:500])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def serve(memory_bytes: int) -> None:
    """Answer calls from standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # What a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            call: HelperCall = decode(_receive(sys.stdin.buffer, None), HelperCall)
        except (EOFError, ValueError, ProtocolError):
            return
        answer = _answer(call)
        try:
            message = encode(answer)
        except (TypeError, ValueError) as error:
            message = encode(HelperAnswer(error=type(error).__name__, detail=str(error)[:500]))
        _send(answers, message)

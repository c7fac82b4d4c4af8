"""Work that verifiers and its libraries repeat for every episode, done once or done more cheaply.

Nothing here changes what is recorded: the interception, the graph and the tokens stay verifiers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic._internal import _fields
from renderers import base as renderers_base
from verifiers.v1 import env
from verifiers.v1.clients import train
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.runtimes.docker import DockerRuntime
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.serve import delta
from verifiers.v1.utils import decorators, memory

from gradus.environments.verifiers import in_process
from gradus.environments.verifiers.patch import wrap
from gradus.tokenizing import load_tokenizer

INLINE_SECONDS = 0.002
"""A renderer whose last renders took less CPU time than this renders on the event loop."""
INLINE_CHARACTERS = 32_768
"""Longer messages are rendered on a thread, whatever the renders before took."""
GATHER_SECONDS = 2.0
"""How long a change of a trace waits for others before it is streamed; the orchestrator reads no
trace before its end."""
TRIM_SECONDS = 10.0
"""Between two walks over the heap that give freed memory back to the system."""
KILL_SECONDS = 10.0
"""How long a container engine may take to send a signal."""
SHORT_TEXT_CHARACTERS = 64
REMEMBERED_TEXTS = 4096
_FORGET = 0.8

T = TypeVar("T")


def serve_in_process() -> None:
    """Let harnesses of this process call its interception servers without HTTP."""

    def remembered(start: Any) -> Any:
        async def start_and_remember(started: InterceptionServer) -> None:
            await start(started)
            in_process.remember(started)

        return start_and_remember

    wrap(InterceptionServer, "start", remembered)


def render_inline() -> None:
    """Render short prompts on the event loop, long ones on a thread as before."""
    costs = _RenderCosts()
    is_long: ContextVar[bool] = ContextVar("is_long", default=False)

    def measured(get_response: Any) -> Any:
        async def get_measured(
            client: Any, dialect: Any, body: Any, *rest: Any, **more: Any
        ) -> Any:
            contents = (message.get("content") for message in body["messages"])
            is_long.set(sum(len(str(content)) for content in contents) > INLINE_CHARACTERS)
            return await get_response(client, dialect, body, *rest, **more)

        return get_measured

    def inline(run_on_thread: Any) -> Any:
        async def run_in_slot(slot: Any, render: Callable[[], T]) -> T:
            measured = functools.partial(costs.measure, slot, render)
            if is_long.get() or not costs.is_quick(slot) or not slot.lock.acquire(blocking=False):
                result: T = await run_on_thread(slot, measured)
                return result
            try:
                return measured()
            finally:
                slot.lock.release()

        return run_in_slot

    wrap(train.TrainClient, "get_response", measured)
    wrap(train.RendererSlot, "run", inline)


class _RenderCosts:
    """Knows what each renderer's last renders cost; the newest counts at once when it is slow."""

    def __init__(self) -> None:
        self._seconds: WeakKeyDictionary[threading.Lock, float] = WeakKeyDictionary()

    def is_quick(self, slot: Any) -> bool:
        """Whether the next render is likely to be short; False before the first."""
        return self._seconds.get(slot.lock, INLINE_SECONDS) < INLINE_SECONDS

    def measure(self, slot: Any, render: Callable[[], T]) -> T:
        started = time.thread_time()
        try:
            return render()
        finally:
            spent = time.thread_time() - started
            self._seconds[slot.lock] = max(spent, _FORGET * self._seconds.get(slot.lock, 0.0))


def gather_changes() -> None:
    """Send the changes of a trace that fall within two seconds as one message.

    The end of the episode flushes at once, as before.
    """

    def gathered(_: Any) -> Any:
        def gather(streamer: Any, trace: object) -> None:  # noqa: ARG001
            if streamer._scheduled is None:
                loop = asyncio.get_running_loop()
                streamer._scheduled = loop.call_later(GATHER_SECONDS, streamer._start_flush)

        return gather

    wrap(delta.DeltaStreamer, "_changed", gathered)


def trim_memory_by_time() -> None:
    """Give memory back every ten seconds at most, however many episodes end."""
    env.trim_memory_periodically = _Trimming(time.monotonic).after_episode


class _Trimming:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trimmed_at = clock()

    async def after_episode(self) -> None:
        now = self._clock()
        if now - self._trimmed_at >= TRIM_SECONDS:
            self._trimmed_at = now
            await asyncio.to_thread(memory.trim_memory)


def remove_empty_folders_inline() -> None:
    """Remove the folder of an episode that left no files without a thread."""

    def inline(teardown: Any) -> Any:
        async def tear_down(runtime: Any) -> None:
            if runtime.workdir is not None and not runtime._background:
                with contextlib.suppress(OSError):
                    os.rmdir(runtime.workdir)
                    return
            await teardown(runtime)

        return tear_down

    wrap(SubprocessRuntime, "teardown", inline)


def kill_containers() -> None:
    """Kill a container before it is removed, which else waits ten seconds for a `sleep`."""

    def killed(cleanup: Any) -> Any:
        def kill_and_clean_up(runtime: Any) -> None:
            if not (runtime.info.borrowed or runtime._container is None or runtime._stopped):
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    subprocess.run(
                        [runtime.engine, "kill", runtime._container],
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        timeout=KILL_SECONDS,
                        check=False,
                    )
            cleanup(runtime)

        return kill_and_clean_up

    wrap(DockerRuntime, "cleanup", killed)


def remember_signatures() -> None:
    """Inspect each default factory once instead of once per constructed model."""
    wrap(_fields, "takes_validated_data_argument", functools.lru_cache(maxsize=4096))


def remember_hooks() -> None:
    """Search each class once for the functions that carry a mark."""
    discover = decorators.discover_decorated
    if hasattr(discover, "__wrapped__"):
        return
    names: WeakKeyDictionary[type, dict[str, list[str]]] = WeakKeyDictionary()

    @functools.wraps(discover)
    def discover_once(obj: object, attr: str) -> list[Callable[..., Any]]:
        if _overrides_a_hook(obj, attr):
            return list(discover(obj, attr))
        of_class = names.setdefault(type(obj), {})
        if attr not in of_class:
            methods: list[Callable[..., Any]] = discover(obj, attr)
            if all(isinstance(method, types.MethodType) for method in methods):
                of_class[attr] = _names_of(obj, methods)
            return methods
        return [getattr(obj, name) for name in of_class[attr]]

    _replace_everywhere("verifiers", discover, discover_once)


def _overrides_a_hook(obj: object, attr: str) -> bool:
    own = getattr(obj, "__dict__", {})
    return any(hasattr(getattr(type(obj), name, None), attr) for name in own)


def _names_of(obj: object, methods: list[Any]) -> list[str]:
    """Under which name of its class each bound method is found, which need not be its own."""
    by_function = {
        getattr(getattr(obj, name), "__func__", None): name
        for klass in type(obj).__mro__
        for name, value in vars(klass).items()
        if callable(value)
    }
    return [by_function[method.__func__] for method in methods]


def remember_hook_signatures() -> None:
    """Inspect each method once instead of at each call of `invoke`."""
    if isinstance(decorators.inspect, types.ModuleType):
        decorators.inspect = SimpleNamespace(signature=signature_of)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`; that of a method is remembered for all objects of its class."""
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return _signature_of_method(function.__func__)
    return inspect.signature(function)


@functools.lru_cache(maxsize=4096)
def _signature_of_method(function: types.FunctionType) -> inspect.Signature:
    return inspect.signature(types.MethodType(function, function))


def remember_short_texts() -> None:
    """Encode each marker of a chat template once; ask a tokenizer once whether it has offsets.

    Also load it without torch, as its `tokenizer.json` says.
    """
    load = renderers_base.load_tokenizer
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_remembering(model_name_or_path: str) -> Any:
        tokenizer = load_tokenizer(model_name_or_path, load=load)
        tokenizer.encode = remembering(tokenizer.encode)
        return tokenizer

    renderers_base.load_tokenizer = load_remembering
    find = renderers_base._get_offset_tokenizer
    has_offsets: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    @functools.wraps(find)
    def find_once(tokenizer: Any) -> Any:
        if type(tokenizer).__hash__ is None:
            return find(tokenizer)
        known = has_offsets.get(tokenizer)
        if known is None:
            known = has_offsets[tokenizer] = find(tokenizer) is not None
        return tokenizer if known else None

    _replace_everywhere("renderers", find, find_once)


def remembering(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """`encode` that remembers short texts, when asked as renderers do."""
    plain = {"add_special_tokens": False}
    known = functools.lru_cache(REMEMBERED_TEXTS)(lambda text: tuple(encode(text, **plain)))

    @functools.wraps(encode)
    def encode_once(text: Any, *arguments: Any, **options: Any) -> list[int]:
        is_short = isinstance(text, str) and len(text) <= SHORT_TEXT_CHARACTERS
        if is_short and not arguments and options == plain:
            return list(known(text))
        return encode(text, *arguments, **options)

    return encode_once


def _replace_everywhere(package: str, old: object, new: object) -> None:
    """Put `new` where modules of a package have imported `old` by name."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)

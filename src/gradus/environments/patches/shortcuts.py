"""Work that verifiers and its libraries repeat for every episode, done once or done more cheaply.

Nothing here changes what is recorded. Each can go when verifiers, renderers or pydantic_config do
the same; the share is that of a one-turn episode's CPU time with the chat harness.

| shortcut | reason | share |
|---|---|---|
| `serve_in_process` | HTTP between two coroutines of one process | 28 % |
| `trim_memory_by_time` | the heap is walked after every 16th episode | 8 % |
| `remove_empty_folders_inline` | a thread hop to remove an empty folder | 5 % |
| `remember_hooks` | each class is searched for hooks five times | 4 % |
| `remember_hook_signatures` | each hook is inspected at each call | 4 % |
| `remember_short_texts` | markers of a template are encoded in each turn | 4 % |
| `remember_plugins` | the import path is searched for each harness | 2 % |
| `remember_annotations` | the annotations of each config are inspected | 2 % |
| `kill_containers` | a container's first process ignores SIGTERM | 10 s of waiting |
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from renderers import base as renderers_base
from verifiers.v1 import env
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.runtimes.docker import DockerRuntime
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils import decorators, loaders, memory

from gradus.environments.patches import in_process
from gradus.environments.patches.known import Patch

TRIM_SECONDS = 10.0
"""Between two walks over the heap that give freed memory back to the system."""
KILL_SECONDS = 10.0
"""How long a container engine may take to send a signal."""
SHORT_TEXT_CHARACTERS = 64
REMEMBERED_TEXTS = 4096
_HOOKED = "verifiers.v1.utils.decorators:"
_MEMORY = "verifiers.v1.utils.memory:"
_SERVER = "verifiers.v1.interception.server:"


def serve_in_process() -> None:
    """Let harnesses of this process call its interception servers without HTTP."""
    start = InterceptionServer.start
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    async def start_and_remember(started: InterceptionServer) -> None:
        await start(started)
        in_process.remember(started)

    InterceptionServer.start = start_and_remember


def trim_memory_by_time() -> None:
    """Give memory back every ten seconds at most, however many episodes end."""
    env.trim_memory_periodically = _Trimming(time.monotonic).after_episode


class _Trimming:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trimmed_at = clock()

    async def after_episode(self) -> None:
        """verifiers' `trim_memory_periodically`."""
        now = self._clock()
        if now - self._trimmed_at >= TRIM_SECONDS:
            self._trimmed_at = now
            await asyncio.to_thread(memory.trim_memory)


def remove_empty_folders_inline() -> None:
    """Remove the folder of an episode that left no files without a thread."""
    teardown = SubprocessRuntime.teardown
    if hasattr(teardown, "__wrapped__"):
        return

    @functools.wraps(teardown)
    async def tear_down(runtime: Any) -> None:
        if runtime.workdir is not None and not runtime._background:
            try:
                os.rmdir(runtime.workdir)
            except OSError:
                await teardown(runtime)
            return
        await teardown(runtime)

    SubprocessRuntime.teardown = tear_down


def kill_containers() -> None:
    """Kill a container before it is removed, which else waits ten seconds for a `sleep`."""
    cleanup = DockerRuntime.cleanup
    if hasattr(cleanup, "__wrapped__"):
        return

    @functools.wraps(cleanup)
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

    DockerRuntime.cleanup = kill_and_clean_up


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
    """Whether the object itself, not its class, holds something under the name of a hook."""
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
        decorators.inspect = SimpleNamespace(signature=_Signatures().of)


class _Signatures:
    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()

    def of(self, function: Callable[..., Any]) -> inspect.Signature:
        """`inspect.signature`; that of a method is remembered for all objects of its class."""
        if not isinstance(function, types.MethodType):
            return inspect.signature(function)
        plain = function.__func__
        if not isinstance(plain, types.FunctionType):
            return inspect.signature(function)
        known = self._known.get(plain)
        if known is None:
            known = self._known[plain] = inspect.signature(function)
        return known


def remember_short_texts() -> None:
    """Encode each marker of a chat template once; ask a tokenizer once whether it has offsets."""
    load = renderers_base.load_tokenizer
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_remembering(model_name_or_path: str) -> Any:
        tokenizer = load(model_name_or_path)
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
    known: dict[str, tuple[int, ...]] = {}

    @functools.wraps(encode)
    def encode_once(text: Any, *arguments: Any, **options: Any) -> list[int]:
        if (
            arguments
            or options != {"add_special_tokens": False}
            or not isinstance(text, str)
            or len(text) > SHORT_TEXT_CHARACTERS
        ):
            return encode(text, *arguments, **options)
        token_ids = known.get(text)
        if token_ids is None:
            token_ids = tuple(encode(text, **options))
            if len(known) < REMEMBERED_TEXTS:
                known[text] = token_ids
        return list(token_ids)

    return encode_once


def remember_plugins() -> None:
    """Find the module of a harness or taskset once; one that is missing is looked for again."""
    if not hasattr(loaders._import_plugin, "cache_info"):
        loaders._import_plugin = functools.lru_cache(maxsize=256)(loaders._import_plugin)


def remember_annotations() -> None:
    """Ask once per field of a config whether it holds a dict."""
    # The package has a function of the same name as the module.
    cli: Any = importlib.import_module("pydantic_config.cli")
    is_dict = cli._is_dict_annotation
    if hasattr(is_dict, "__wrapped__"):
        return
    # By identity, since annotations need not be hashable; each is kept, so none is reused.
    known: dict[int, tuple[Any, bool]] = {}

    @functools.wraps(is_dict)
    def is_dict_once(annotation: Any) -> bool:
        answer = known.get(id(annotation))
        if answer is None:
            answer = known[id(annotation)] = (annotation, is_dict(annotation))
        return answer[1]

    cli._is_dict_annotation = is_dict_once


def _replace_everywhere(package: str, old: object, new: object) -> None:
    """Put `new` where modules of a package have imported `old` by name."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


SHORTCUTS = (
    Patch(
        serve_in_process,
        {
            f"{_SERVER}InterceptionServer.start": "84841ab6eab75547",
            f"{_SERVER}InterceptionServer._handler_for": "981e30fad6f46928",
            f"{_SERVER}InterceptionServer.handle_request": "9ca91a941b9d5571",
            f"{_SERVER}InterceptionServer.handle_tool": "5d17ef1b83d8fa35",
            f"{_SERVER}_finish_idempotent_attempt": "e6b1df9f4ca071b5",
            "verifiers.v1.session:RolloutSession.adopt": "4da19a87bbd30a17",
            "verifiers.v1.session:RolloutSession.release": "3862349962838e91",
        },
    ),
    Patch(trim_memory_by_time, {f"{_MEMORY}trim_memory_periodically": "7f9cf65a70a4dea2"}),
    Patch(
        remove_empty_folders_inline,
        {"verifiers.v1.runtimes.subprocess:SubprocessRuntime.teardown": "003d59113f940d4e"},
    ),
    Patch(
        kill_containers, {"verifiers.v1.runtimes.docker:DockerRuntime.cleanup": "7ecc175a583d87d6"}
    ),
    Patch(remember_hooks, {f"{_HOOKED}discover_decorated": "c0853e5025dec460"}),
    Patch(remember_hook_signatures, {f"{_HOOKED}invoke": "671215d82dfa27b1"}),
    Patch(
        remember_short_texts,
        {
            "renderers.base:load_tokenizer": "3dfc43fe9c0d5301",
            "renderers.base:_get_offset_tokenizer": "48d5d56591343bc0",
        },
    ),
    Patch(remember_plugins, {"verifiers.v1.utils.loaders:_import_plugin": "cecd073e13ed4cf2"}),
    Patch(remember_annotations, {"pydantic_config.cli:_is_dict_annotation": "064beb6eb4b7cab6"}),
)

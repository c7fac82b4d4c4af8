"""Every change of a library's behaviour inside environment workers, each with its reason.

Only what costs time, leaves files behind or ends the process is replaced, never what is recorded:
the interception, the graph and the tokens stay verifiers' own. A patch is applied to the exact
version that it was written for; with another one the library works unpatched, slower and with one
seed for all requests of an episode, and a warning says so. What only saves time, and can be left
out one by one, is in `patches.shortcuts`.

| patch | reason (share of an episode's CPU time) | remove when |
|---|---|---|
| `use_engine_client` | openai + httpx around one JSON post: 20 % | verifiers takes a client |
| `seed_each_request` | one seed for all calls of an episode | verifiers seeds each call |
| `read_every_tool_call` | a call that a model wrote badly ends its episode | verifiers reads each |
| `render_inline` | a thread hop costs more than a short render: 4 % | verifiers decides by cost |
| `gather_changes` | every change of a trace is a message: 12 % | verifiers has an interval |
| `remember_signatures` | pydantic inspects factories at every construct: 8 % | pydantic caches it |
| `survive_exits` | `exit()` in a reward ends the worker | verifiers catches `SystemExit` |
| `bound_tool_servers` | dead servers are waited for, none is counted | verifiers looks at them |
| `end_servers_with_worker` | a server outlives a worker killed while it imports | it asks earlier |
| `send_task_headers` | all requests of a client have the same headers | a task can name some |
| `keep_worker_sockets_in` | a killed broker leaves its sockets | verifiers takes a folder |
| `move_episode_folders` | a killed worker leaves folders in the home | verifiers takes a folder |
| `watch_workers` | a blocked worker goes on getting episodes | verifiers asks its workers |
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pydantic
from pydantic._internal import _fields
from renderers import parsing
from renderers.base import ParsedToolCall
from verifiers.v1 import env, errors, harness, rollout, task
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients import train
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import subprocess as runtime
from verifiers.v1.serve import delta, pool
from verifiers.v1.utils import decorators

from gradus.environments.engine_client import EngineClient, RequestSeeds
from gradus.environments.harness.tool_servers import (
    SharedToolServers,
    ToolServerLimits,
    ToolServerSlots,
    read_port,
    serve_within,
    start_in_time,
)
from gradus.environments.patches.known import install_known
from gradus.environments.patches.shortcuts import SHORTCUTS
from gradus.environments.patches.task_headers import send_task_headers
from gradus.log import get_logger
from gradus.processes.child import dying_with_parent

VERIFIERS_VERSION = "0.4.0"
INLINE_SECONDS = 0.002
"""A renderer whose last renders took less CPU time than this renders on the event loop."""
GATHER_SECONDS = 2.0
"""How long a change of a trace waits for others before it is streamed; the orchestrator reads no
trace before its end."""
_FORGET = 0.8

T = TypeVar("T")
log = get_logger(__name__)


def apply(tool_servers: ToolServerLimits, headers_from: str | None = None) -> None:
    """Patch this process, once; does nothing for other versions than the known ones.

    `headers_from` is the field of a task's data with headers for its model requests.
    """
    remember_signatures()
    if not is_known_version():
        log.warning(
            "verifiers %s is not %s: its workers run unpatched, slower, and all requests of an "
            "episode share a seed",
            importlib.metadata.version("verifiers"),
            VERIFIERS_VERSION,
        )
        return
    seeds = RequestSeeds()
    use_engine_client(seeds)
    seed_each_request(seeds)
    read_every_tool_call()
    render_inline()
    gather_changes()
    survive_exits()
    bound_tool_servers(tool_servers)
    end_servers_with_worker()
    if headers_from is not None:
        send_task_headers(headers_from)
    move_episode_folders(Path(tempfile.gettempdir()))
    install_known(SHORTCUTS)


def is_known_version() -> bool:
    """Whether the patches fit the installed verifiers."""
    return importlib.metadata.version("verifiers") == VERIFIERS_VERSION


def watch_workers(build_pool: Callable[..., Any]) -> None:
    """Build pools with `build_pool`, which asks the workers whether they live."""
    if is_known_version():
        pool.EnvServerPool = build_pool


def use_engine_client(seeds: RequestSeeds) -> None:
    """Ask the engine with one post instead of the openai client."""
    train.build_async_openai = functools.partial(EngineClient, seeds=seeds)


def seed_each_request(seeds: RequestSeeds) -> None:
    """Give each request to another model its own seed, as the engine client does."""
    send = eval_client.EvalClient._request
    if hasattr(send, "__wrapped__"):
        return

    @functools.wraps(send)
    async def send_seeded(
        client: Any, url: str, body: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        return await send(client, url, seeds.renewed(body), *rest, **more)

    eval_client.EvalClient._request = send_seeded


def read_every_tool_call() -> None:
    """Let a model's call come through whatever its JSON holds; the harness answers that it is none.

    A name that is no text, half of a surrogate pair and deep nesting raise otherwise: the episode
    would fail, and a model could so escape a low reward. The tokens stay as they were sampled.
    """
    read = train.response_from_generate
    if hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_mended(result: dict[str, Any], *rest: Any, **more: Any) -> Any:
        calls = [_mended(call) for call in result.get("tool_calls") or []]
        return read({**result, "tool_calls": calls}, *rest, **more)

    train.response_from_generate = read_mended
    parsing.json = SimpleNamespace(**{**vars(json), "loads": _loads})


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deep", text[:80], 0) from None


def _mended(call: ParsedToolCall) -> ParsedToolCall:
    def as_text(value: Any) -> str:
        try:
            text = value if isinstance(value, str) else json.dumps(value)
        except RecursionError:
            text = "nested too deep"
        return text.encode("utf-8", "replace").decode()

    name = as_text(call.name) if call.name else None
    return replace(call, name=name, arguments=as_text(call.arguments or {}))


def render_inline() -> None:
    """Render short prompts on the event loop, long ones on a thread as before."""
    run_on_thread = train.RendererSlot.run
    if hasattr(run_on_thread, "__wrapped__"):
        return
    costs = _RenderCosts()

    @functools.wraps(run_on_thread)
    async def run_in_slot(slot: Any, render: Callable[[], T]) -> T:
        measured = functools.partial(costs.measure, slot, render)
        if not costs.is_quick(slot) or not slot.lock.acquire(blocking=False):
            result: T = await run_on_thread(slot, measured)
            return result
        try:
            return measured()
        finally:
            slot.lock.release()

    train.RendererSlot.run = run_in_slot


def gather_changes() -> None:
    """Send the changes of a trace that fall within two seconds as one message."""
    delta.DeltaStreamer._changed = _gather


def survive_exits() -> None:
    """Let `exit()` in code of an environment, or in what it runs, fail the episode alone.

    asyncio passes `SystemExit` through the loop, which ends the worker with all its episodes.
    """
    for module in (env, harness, rollout, task):
        module.boundary = _Boundary
    task.invoke_all = harness.invoke_all = _invoke_all


def bound_tool_servers(limits: ToolServerLimits) -> None:
    """Bound how long a tool server takes to start and how many there are; replace dead ones."""
    if hasattr(launch.serve_in_runtime, "__wrapped__"):
        return
    started = start_in_time(launch.serve_in_runtime, limits)
    launch.serve_in_runtime = functools.wraps(launch.serve_in_runtime)(started)
    launch._read_back_port = functools.partial(read_port, limits=limits)
    shared = SharedToolServers(env.serve_shared)
    env.serve_shared = shared.serve
    rollout.serve_tools = serve_within(rollout.serve_tools, ToolServerSlots(limits), shared)


def end_servers_with_worker() -> None:
    """Let what a runtime starts in the background, tool servers above all, die with this process.

    verifiers' servers ask for that themselves, but only after their imports, which take seconds.
    """
    start = runtime.SubprocessRuntime.run_background
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    async def start_dying(started: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        command = dying_with_parent(argv) if Path(argv[0]).is_absolute() else argv
        await start(started, command, env, log)

    runtime.SubprocessRuntime.run_background = start_dying


def keep_worker_sockets_in(directory: Path) -> None:
    """Give the pool of this process a folder inside ours for its workers' sockets."""
    folder = directory / "w"
    folder.mkdir(mode=0o700)
    pool.tempfile = SimpleNamespace(mkdtemp=lambda **_: str(folder))


def move_episode_folders(temporary: Path) -> None:
    """Put the working folders of episodes below a folder that goes away with the launch."""
    runtime.CACHE_DIR = temporary / "verifiers"


def remember_signatures() -> None:
    """Inspect each default factory once instead of once per constructed model."""
    inspect_factory = _fields.takes_validated_data_argument
    if hasattr(inspect_factory, "cache_info"):
        return
    if not callable(inspect_factory):
        log.warning("pydantic %s is not known: it runs unpatched and slower", pydantic.VERSION)
        return
    remembered: Any = functools.lru_cache(maxsize=4096)(inspect_factory)
    _fields.takes_validated_data_argument = remembered


class _RenderCosts:
    """Knows what each renderer's last renders cost; the newest counts at once when it is slow."""

    def __init__(self) -> None:
        self._seconds: WeakKeyDictionary[threading.Lock, float] = WeakKeyDictionary()

    def is_quick(self, slot: Any) -> bool:
        """Whether the next render is likely to be short; False before the first."""
        return self._seconds.get(slot.lock, INLINE_SECONDS) < INLINE_SECONDS

    def measure(self, slot: Any, render: Callable[[], T]) -> T:
        """Run `render` and remember its cost."""
        started = time.thread_time()
        try:
            return render()
        finally:
            spent = time.thread_time() - started
            self._seconds[slot.lock] = max(spent, _FORGET * self._seconds.get(slot.lock, 0.0))


class _Boundary:
    """verifiers' `boundary`, for which an exit is an error like any other.

    A class, because two nested generators around each of a dozen stages cost more than the stages.
    """

    def __init__(self, error_cls: type[errors.RolloutError], what: str) -> None:
        self._error_cls = error_cls
        self._what = what

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, errors.RolloutError):
            return
        if isinstance(error, TimeoutError):
            raise self._error_cls(f"{self._what} timed out") from error
        if isinstance(error, SystemExit):
            error = _exit_error(error)
        if isinstance(error, Exception):
            text = f"{self._what}: {type(error).__name__}: {error}"
            raise self._error_cls(text) from error


async def _invoke_all(
    functions: Sequence[Callable[..., Any]], available: Mapping[str, Any]
) -> list[Any]:
    """verifiers' `invoke_all`; an exit must not leave a task, or it ends the loop."""

    async def call(function: Callable[..., Any]) -> Any:
        with _exit_as_error():
            return await decorators.invoke(function, dict(available))

    return await asyncio.gather(*(call(function) for function in functions))


@contextlib.contextmanager
def _exit_as_error() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise _exit_error(error) from error


def _exit_error(error: SystemExit) -> RuntimeError:
    raised = RuntimeError(
        f"the code asked the interpreter to exit (SystemExit: {error.code}); run code that may do "
        "so in a separate process"
    )
    raised.__cause__ = error
    return raised


def _gather(streamer: Any, trace: object) -> None:  # noqa: ARG001
    """`DeltaStreamer._changed`; the end of the episode flushes at once, as before."""
    if streamer._scheduled is None:
        loop = asyncio.get_running_loop()
        streamer._scheduled = loop.call_later(GATHER_SECONDS, streamer._start_flush)

"""Every change of a library's behaviour inside environment workers, each with its reason.

Nothing that is recorded is replaced: the interception, the graph and the tokens stay verifiers'
own. Each patch names the code that it was written for. Where that changed, a patch that only saves
time is left out, with a warning; one that changes what an episode is keeps everything from
starting. More of the first kind are in `patches.shortcuts`.

| patch | reason (share of an episode's CPU time) | remove when |
|---|---|---|
| `keep_content_plain` | text of users and tools becomes control tokens | renderers keeps it text |
| `use_engine_client` | openai + httpx around one JSON post: 20 % | verifiers takes a client |
| `seed_each_request` | one seed for all calls of an episode | verifiers seeds each call |
| `read_every_tool_call` | a call that cannot be read ends its episode | verifiers reads each |
| `refuse_what_no_template_takes` | a bad request looks like a dead engine | verifiers says 400 |
| `cancel_left_calls` | a reply that its caller left trains | verifiers cancels it |
| `render_inline` | a thread hop costs more than a short render: 4 % | verifiers decides by cost |
| `gather_changes` | every change of a trace is a message: 12 % | verifiers has an interval |
| `remember_signatures` | pydantic inspects factories at every construct: 8 % | pydantic caches it |
| `survive_exits` | `exit()` in a reward ends the worker | verifiers catches `SystemExit` |
| `bound_tool_servers` | dead servers are waited for, none is counted | verifiers looks at them |
| `end_servers_with_worker` | a server imports less than its worker and outlives it | it does not |
| `import_nested_plugins` | an id cannot name a module inside a package | verifiers imports it |
| `send_task_headers` | all requests of a client have the same headers | a task can name some |
| `keep_worker_sockets_in` | a killed broker leaves its sockets | verifiers takes a folder |
| `move_episode_folders` | a killed worker leaves folders in the home | verifiers takes a folder |
| `watch_workers` | a blocked worker keeps getting episodes | verifiers asks its workers |
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import os
import secrets
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pydantic
from pydantic._internal import _fields
from renderers import parsing
from renderers.base import ParsedToolCall
from verifiers.v1 import env, errors, harness, rollout, task
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.clients import train
from verifiers.v1.interception import server
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import subprocess as runtime
from verifiers.v1.serve import delta, pool
from verifiers.v1.utils import decorators

from gradus.environments.engine_client import EngineClient, RequestSeeds, request_seed
from gradus.environments.harness.tool_servers import (
    SharedToolServers,
    ToolServerLimits,
    ToolServerSlots,
    read_port,
    serve_within,
    start_in_time,
)
from gradus.environments.patches.known import Patch, install_known, refuse_changed
from gradus.environments.patches.nested_plugins import import_nested_plugins
from gradus.environments.patches.plain_content import keep_content_plain
from gradus.environments.patches.shortcuts import SHORTCUTS
from gradus.environments.patches.task_headers import send_task_headers
from gradus.log import get_logger
from gradus.processes.child import dying_with_parent

INLINE_SECONDS = 0.002
"""A renderer whose last renders took less CPU time than this renders on the event loop."""
INLINE_CHARACTERS = 32_768
"""Longer messages are rendered on a thread, whatever the renders before took."""
GATHER_SECONDS = 2.0
"""How long a change of a trace waits for others before it is streamed; the orchestrator reads no
trace before its end."""
WORKER_FOLDER = "w"
"""Holds the sockets of the workers, inside the pool's folder."""
_FORGET = 0.8
_TRAIN = "verifiers.v1.clients.train:"
_SERVER = "verifiers.v1.interception.server:"
_LAUNCH = "verifiers.v1.mcp.launch:"
_RUNTIME = "verifiers.v1.runtimes.subprocess:SubprocessRuntime."
_POOL = "verifiers.v1.serve.pool:EnvServerPool."

T = TypeVar("T")
log = get_logger(__name__)


def worker_patches(
    tool_servers: ToolServerLimits | None = None, headers_from: str | None = None
) -> tuple[Patch, ...]:
    """What is changed in a worker.

    `headers_from` is the field of a task's data with headers for its model requests.
    """
    own_headers = Patch(
        partial(send_task_headers, headers_from or ""),
        {f"{_SERVER}InterceptionServer.register": "840e7346a77a962c"},
        "`headers_from` would send nothing",
    )
    return (
        *_request_patches(),
        *_process_patches(tool_servers or ToolServerLimits()),
        *((own_headers,) if headers_from is not None else ()),
    )


def _request_patches() -> tuple[Patch, ...]:
    seeds = RequestSeeds()
    one_seed = "all requests of an episode would share one seed"
    rendering = {
        f"{_TRAIN}RendererSlot.run": "3b2314a359c6557b",
        f"{_TRAIN}TrainClient.get_response": "119c604871f8d038",
    }
    return (
        Patch(
            partial(use_engine_client, seeds),
            {
                f"{_TRAIN}TrainClient.__init__": "b3352761cd3ccc44",
                "renderers.client:generate": "2c392ec9177c6ce3",
            },
            one_seed,
        ),
        Patch(
            partial(seed_each_request, seeds),
            {"verifiers.v1.clients.eval:EvalClient._request": "28f6fb95c68cecd1"},
            one_seed,
        ),
        Patch(
            read_every_tool_call,
            {f"{_TRAIN}response_from_generate": "df414e71baa3668e"},
            "a tool call that the model wrote badly would fail its episode, and ids would repeat",
        ),
        Patch(
            keep_content_plain,
            {f"{_TRAIN}ElasticRendererPool.grow": "dc57edb5e6955894"},
            "text of users and tools could become control tokens",
        ),
        Patch(render_inline, rendering),
        Patch(
            refuse_what_no_template_takes,
            rendering,
            "a request that cannot be rendered would fail its episode",
        ),
        Patch(
            cancel_left_calls,
            {f"{_SERVER}InterceptionServer.start": "84841ab6eab75547"},
            "replies that their program did not wait for would train",
        ),
        Patch(
            gather_changes,
            {"verifiers.v1.serve.delta:DeltaStreamer._changed": "41a6e1f4410d91e9"},
        ),
    )


def _process_patches(limits: ToolServerLimits) -> tuple[Patch, ...]:
    return (
        Patch(
            survive_exits,
            {
                "verifiers.v1.errors:boundary": "3d5226f12c171e1a",
                "verifiers.v1.utils.decorators:invoke_all": "6208bae46cf05355",
            },
            "exit() in a reward would end the worker with all its episodes",
        ),
        Patch(
            partial(bound_tool_servers, limits),
            {
                f"{_LAUNCH}serve_in_runtime": "5e9c3aaf09a133ab",
                f"{_LAUNCH}_read_back_port": "d94c2209ccc3a962",
                f"{_LAUNCH}serve_shared": "38ffe7c715d0258d",
                f"{_LAUNCH}serve_tools": "912c1b3179949be9",
            },
            "tool servers would be neither bounded nor replaced",
        ),
        Patch(
            end_servers_with_worker,
            {f"{_RUNTIME}run_background": "5226d2792ce8474e"},
            "tool servers would not find your modules, and would outlive a killed worker",
        ),
        Patch(
            import_nested_plugins,
            {"verifiers.v1.utils.loaders:_import_plugin": "cecd073e13ed4cf2"},
            "a harness inside a package would not be found",
        ),
        Patch(
            partial(move_episode_folders, Path(tempfile.gettempdir())),
            {f"{_RUNTIME}start": "24e33bbb9fbcecd9"},
            "a killed worker would leave folders in your home",
        ),
    )


def apply(tool_servers: ToolServerLimits, headers_from: str | None = None) -> None:
    """Patch this process, once; ConfigError where a library changed what an episode depends on."""
    remember_signatures()
    install_known((*worker_patches(tool_servers, headers_from), *SHORTCUTS))


def check_libraries(headers_from: str | None = None) -> None:
    """Raise ConfigError where a library changed what an episode depends on."""
    refuse_changed((*worker_patches(headers_from=headers_from), POOL_PATCH))


def watch_workers(build_pool: Callable[..., Any]) -> None:
    """Build pools with `build_pool`, which asks the workers whether they live."""
    pool.EnvServerPool = build_pool


POOL_PATCH = Patch(
    watch_workers,  # type: ignore[arg-type]
    {
        f"{_POOL}__init__": "99d66ec4bd7ef5b1",
        f"{_POOL}_spawn_worker": "171a0d6e8a9a2ac3",
        f"{_POOL}_maybe_scale_up": "0c470bf7e8dc53e6",
        f"{_POOL}run": "1ca5e5bbb425e37a",
    },
    "a blocked worker would go on getting episodes",
)
"""Only looked at; `pool_process` installs it."""


def use_engine_client(seeds: RequestSeeds) -> None:
    """Ask the engine with one post instead of the openai client."""
    train.build_async_openai = partial(EngineClient, seeds=seeds)


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

    Each call gets its own id, from the seed of its request. verifiers counts the calls of a reply,
    so that ids repeat from turn to turn, which some programs refuse.
    """
    read = train.response_from_generate
    if hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_mended(result: dict[str, Any], *rest: Any, **more: Any) -> Any:
        calls = [_mended(call) for call in result.get("tool_calls") or []]
        for place, call in enumerate(calls):
            call.id = call.id or call_id(request_seed(), result.get("completion_ids"), place)
        return read({**result, "tool_calls": calls}, *rest, **more)

    train.response_from_generate = read_mended
    parsing.json = SimpleNamespace(**{**vars(json), "loads": _loads})


def call_id(seed: int | None, completion_ids: Sequence[int] | None, place: int) -> str:
    """The id of a tool call: nine letters and digits, as some templates demand.

    >>> call_id(7, [1, 2], 0)
    'vptxdopzs'
    """
    if seed is None:  # then nothing repeats anyway
        seed = secrets.randbits(64)
    content = json.dumps([seed, list(completion_ids or ()), place]).encode()
    return base64.b32encode(hashlib.sha256(content).digest())[:9].decode().lower()


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


def refuse_what_no_template_takes() -> None:
    """Answer 400 to messages that cannot be rendered, as to any other request that is wrong.

    verifiers answers 502, which says that the engine failed: libraries try again, and the episode
    is played again, which a policy could use to escape a low reward.
    """
    get_response, run = train.TrainClient.get_response, train.RendererSlot.run
    if hasattr(run, "refuses"):
        return

    @functools.wraps(get_response)
    async def get_supported(*args: Any, **more: Any) -> Any:
        try:
            return await get_response(*args, **more)
        except NotImplementedError as error:
            raise errors.ProviderError(str(error), status_code=400) from error

    @functools.wraps(run)
    async def run_or_refuse(slot: Any, render: Callable[[], T]) -> T:
        try:
            result: T = await run(slot, render)
        except Exception as error:
            text = f"the conversation cannot be rendered: {type(error).__name__}: {error}"
            raise errors.ProviderError(text, status_code=400) from error
        return result

    run_or_refuse.refuses = True  # type: ignore[attr-defined]
    train.TrainClient.get_response = get_supported
    train.RendererSlot.run = run_or_refuse


def cancel_left_calls() -> None:
    """Cancel a model call whose client has left: it is recorded, ends in the engine and trains not.

    verifiers lets it end for a retry of the same bytes; any other retry would train beside it.
    """
    if isinstance(server.web, ModuleType):
        runner = partial(server.web.AppRunner, handler_cancellation=True)
        server.web = SimpleNamespace(**{**vars(server.web), "AppRunner": runner})


def render_inline() -> None:
    """Render short prompts on the event loop, long ones on a thread as before."""
    run_on_thread = train.RendererSlot.run
    if hasattr(run_on_thread, "__wrapped__"):
        return
    costs = _RenderCosts()
    is_long: ContextVar[bool] = ContextVar("is_long", default=False)
    get_response = train.TrainClient.get_response

    @functools.wraps(get_response)
    async def get_measured(client: Any, dialect: Any, body: Any, *rest: Any, **more: Any) -> Any:
        contents = (message.get("content") for message in body["messages"])
        is_long.set(sum(len(str(content)) for content in contents) > INLINE_CHARACTERS)
        return await get_response(client, dialect, body, *rest, **more)

    train.TrainClient.get_response = get_measured

    @functools.wraps(run_on_thread)
    async def run_in_slot(slot: Any, render: Callable[[], T]) -> T:
        measured = partial(costs.measure, slot, render)
        if is_long.get() or not costs.is_quick(slot) or not slot.lock.acquire(blocking=False):
            result: T = await run_on_thread(slot, measured)
            return result
        try:
            return measured()
        finally:
            slot.lock.release()

    train.RendererSlot.run = run_in_slot


def gather_changes() -> None:
    """Send the changes of a trace that fall within two seconds as one message."""
    if not hasattr(delta.DeltaStreamer._changed, "__wrapped__"):
        delta.DeltaStreamer._changed = functools.wraps(delta.DeltaStreamer._changed)(_gather)


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
    bounded = partial(read_port, limits=limits)
    launch._read_back_port = functools.update_wrapper(bounded, launch._read_back_port)
    shared = SharedToolServers(env.serve_shared)
    env.serve_shared = shared.serve
    rollout.serve_tools = serve_within(rollout.serve_tools, ToolServerSlots(limits), shared)


def end_servers_with_worker() -> None:
    """Let what a runtime starts in the background, tool servers above all, die with this process.

    verifiers' servers ask for that themselves, but only after their imports, which take seconds.
    They run in a folder of the episode; what the environment can import, they can.
    """
    start = runtime.SubprocessRuntime.run_background
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    async def start_dying(started: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        if argv[0] == sys.executable:
            env = {**env, "PYTHONPATH": _import_path()}
        command = dying_with_parent(argv) if Path(argv[0]).is_absolute() else argv
        await start(started, command, env, log)

    runtime.SubprocessRuntime.run_background = start_dying


def _import_path() -> str:
    """Where this process finds modules and another one of the same interpreter would not look."""
    everywhere = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    entries = dict.fromkeys(map(os.path.abspath, sys.path))
    own = (entry for entry in entries if not entry.startswith(everywhere) and os.path.isdir(entry))
    return os.pathsep.join(own)


def keep_worker_sockets_in(directory: Path) -> None:
    """Give the pool of this process a folder inside ours for its workers' sockets."""
    folder = directory / WORKER_FOLDER
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

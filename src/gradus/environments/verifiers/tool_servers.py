"""The tool servers of one process: how they start, how many run, and which have to start again.

verifiers starts a process for each server in a task's `toolsets` and looks 180 times for the file
with its port, even after the process has ended; it does not bound how many there are. One in the
taskset's `toolsets` starts once for all episodes, and when it ends, each of them fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verifiers.v1 import env, rollout
from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch

from gradus.environments.verifiers.patch import wrap
from gradus.log import get_logger
from gradus.processes.log_tail import cause_in

LOCAL = "subprocess"
"""Type of the runtime whose processes we can see."""
LOOK_SECONDS = 0.1
"""Between two looks for the port of a local server."""
REMOTE_LOOK_SECONDS = 1.0
_LOG_CHARS = 2_000
"""Of a server's log that an error quotes."""
START_SECONDS = 180.0
"""Without `agent.timeout.setup`: what verifiers grants at least."""

log = get_logger(__name__)


class ToolUrls(dict[str, str]):
    """Tool servers by name, with what is known of them beside their addresses."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        shared: Collection[str] = (),
        stateless: Collection[str] = (),
    ) -> None:
        super().__init__(urls)
        self.shared = frozenset(shared)
        """Those that serve all episodes of the worker."""
        self.stateless = frozenset(stateless)
        """Those of them that keep nothing of an episode."""


@dataclass(frozen=True)
class ToolServerLimits:
    """What the config says."""

    start_seconds: float = START_SECONDS
    """For one server to serve."""
    max_at_once: int = 8
    """Servers that run in one process."""


def granted_seconds(data: Mapping[str, Any], stage: str, usual: float) -> float:
    """The longest deadline that a seat of an environment has for a stage."""
    seats = [seat for seat in data.values() if isinstance(seat, Mapping)]
    timeouts = [seat["timeout"] for seat in seats if isinstance(seat.get("timeout"), Mapping)]
    return max((seconds for it in timeouts if (seconds := it.get(stage))), default=usual)


class ToolServerSlots:
    """Owns the room for tool servers of one process."""

    def __init__(self, limits: ToolServerLimits) -> None:
        self.running = 0
        self._limits = limits
        self._changed = asyncio.Condition()
        self._is_warned = False

    @contextlib.asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        """Hold room for the servers of one agent's attempt; waits while too many run.

        Not forever: episodes that hold the servers of one agent while another agent waits here
        could all wait for each other.
        """
        if not count:
            yield
            return
        self._warn_once()
        try:
            async with asyncio.timeout(self._limits.start_seconds), self._changed:
                await self._changed.wait_for(lambda: self._has_room(count))
                self.running += count
        except TimeoutError:
            self.running += count
            log.warning(
                "no tool server ended in %g s; continuing with %d at once, more than "
                "max_tool_servers = %d",
                self._limits.start_seconds,
                self.running,
                self._limits.max_at_once,
            )
        try:
            yield
        finally:
            self.running -= count
            async with self._changed:
                self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        return not self.running or self.running + count <= self._limits.max_at_once

    def _warn_once(self) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        log.warning(
            "each episode starts its own tool servers (Task.toolsets), at most %d at once in "
            "this process (max_tool_servers). Servers that know no task are cheaper in "
            "Taskset.toolsets: one for all episodes",
            self._limits.max_at_once,
        )


class SharedToolServers:
    """Owns the servers that all episodes of this process share, and starts dead ones again."""

    def __init__(self, serve_shared: Callable[..., Any]) -> None:
        self._serve_shared = serve_shared
        self._toolsets: dict[str, Any] = {}
        self._servers: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._more: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def serve(self, toolsets: Sequence[Any], **more: Any) -> AsyncIterator[dict[str, Any]]:
        """verifiers' `serve_shared`; its mapping changes when a server is replaced."""
        async with self._serve_shared(toolsets, **more) as servers, self._stack:
            self._toolsets = {toolset.server_name: toolset for toolset in toolsets}
            self._servers = servers
            self._more = more
            yield servers

    async def alive(self, servers: Mapping[str, Any]) -> dict[str, Any]:
        """The servers of an episode that starts; those that have ended are replaced for all."""
        if not any(map(_exit_code_of, servers.values())):
            return dict(servers)
        async with self._starting:
            for name, server in servers.items():
                code = _exit_code_of(self._servers.get(name))
                if code is None or name not in self._toolsets:
                    continue
                log.warning(
                    "tool server %r, which all episodes share, ended with exit code %s (%s); it "
                    "is started again",
                    name,
                    code,
                    cause_in(_last_words(server.runtime, name).splitlines()),
                )
                started = await self._stack.enter_async_context(
                    self._serve_shared([self._toolsets[name]], **self._more)
                )
                self._servers[name] = started[name]
        return {name: self._servers.get(name, server) for name, server in servers.items()}


def _exit_code_of(server: Any) -> str | None:
    """How the process of a shared server of this machine ended; None while it runs."""
    runtime = getattr(server, "runtime", None)
    if runtime is None or runtime.type != LOCAL:
        return None
    code = runtime._background[-1].returncode if runtime._background else None
    return None if code is None else str(code)


def _last_words(runtime: Any, name: str) -> str:
    log_file = Path(runtime.info.id or "") / f"vf_tool_{name}.log"
    with contextlib.suppress(OSError):
        return log_file.read_text(errors="replace")[-_LOG_CHARS:].strip() or "it wrote nothing"
    return "it left no log"


def serve_within(
    serve_tools: Callable[..., Any],
    slots: ToolServerSlots,
    shared_servers: SharedToolServers | None = None,
) -> Callable[..., Any]:
    """verifiers' `serve_tools`, which first waits for room for the servers that it starts.

    It says which servers keep nothing of an episode, and replaces shared ones that have ended.
    """

    @contextlib.asynccontextmanager
    async def serve(
        toolsets: Sequence[Any],
        runtime: Any = None,
        shared: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> AsyncIterator[dict[str, str]]:
        shared = shared or {}
        if shared_servers is not None:
            shared = await shared_servers.alive(shared)
        started = sum(not toolset.config.url for toolset in toolsets)
        async with (
            slots.hold(started),
            serve_tools(toolsets, runtime, shared=shared, **more) as urls,
        ):
            stateless = {name for name, server in shared.items() if not server.state_secret}
            yield ToolUrls(urls, shared=set(shared), stateless=stateless)

    return serve


def start_in_time(
    serve_in_runtime: Callable[..., Awaitable[int]], limits: ToolServerLimits
) -> Callable[..., Awaitable[int]]:
    """verifiers' `serve_in_runtime`, with a deadline and an error that begins with its cause."""

    async def serve_in_time(server: Any, runtime: Any, **options: Any) -> int:
        is_local = runtime.type == LOCAL
        # A sandbox may have to install packages first, which has its own deadlines.
        seconds = limits.start_seconds if is_local else None
        name = server.server_name or type(server).__name__
        start = serve_in_runtime(server, runtime, **options)
        try:
            async with asyncio.timeout(seconds):
                return await (_while_it_runs(start, server, runtime) if is_local else start)
        except TimeoutError as error:
            if seconds is None:
                raise
            said = _last_words(runtime, server.server_name)
            raise ToolsetError(
                f"tool server {name!r} did not start in agent.timeout.setup = {seconds:g} s; "
                f"its last words: {said}"
            ) from error
        except ToolsetError as error:
            cause = cause_in(str(error).splitlines())
            raise ToolsetError(f"tool server {name!r} did not start: {cause}\n{error}") from error

    return serve_in_time


async def _while_it_runs(start: Awaitable[int], server: Any, runtime: Any) -> int:
    """The result of `start`; ToolsetError with the end of its log once the server has ended."""
    place = len(runtime._background)
    serving = asyncio.ensure_future(start)
    try:
        while not (await asyncio.wait({serving}, timeout=LOOK_SECONDS))[0]:
            started = runtime._background[place : place + 1]
            if started and started[0].returncode is not None:
                said = _last_words(runtime, server.server_name)
                raise ToolsetError(f"it ended with exit code {started[0].returncode}: {said}")
        return serving.result()
    finally:
        if not serving.done():
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


async def read_port(runtime: Any, path: str, *, limits: ToolServerLimits) -> int:
    """The port in the file that a server writes. verifiers leaves the file of a local server."""
    is_local = runtime.type == LOCAL
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.start_seconds
    while loop.time() < deadline:
        with contextlib.suppress(Exception):
            text = (await runtime.read(path)).decode().strip()
            if text.isdigit():
                if is_local:
                    Path(path).unlink(missing_ok=True)
                return int(text)
        await asyncio.sleep(LOOK_SECONDS if is_local else REMOTE_LOOK_SECONDS)
    raise ToolsetError(f"it named no port within {limits.start_seconds:g} s")


def bound_tool_servers(limits: ToolServerLimits) -> None:
    """Bound how long a tool server takes to start and how many there are; replace dead ones."""
    if hasattr(launch.serve_in_runtime, "layers"):
        return

    def in_time(serve_in_runtime: Any) -> Any:
        return start_in_time(serve_in_runtime, limits)

    def told(_: Any) -> Any:
        return partial(read_port, limits=limits)

    wrap(launch, "serve_in_runtime", in_time)
    wrap(launch, "_read_back_port", told)
    shared = SharedToolServers(env.serve_shared)
    env.serve_shared = shared.serve
    rollout.serve_tools = serve_within(rollout.serve_tools, ToolServerSlots(limits), shared)

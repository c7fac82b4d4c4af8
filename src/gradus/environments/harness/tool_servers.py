"""The tool servers of one worker's episodes: how they start, how many run, and calls to them.

verifiers starts a process for each server in a task's `toolsets` and looks 180 times for the file
with its port, even after the process has ended; it does not bound how many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.v1.errors import ToolsetError
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp

from gradus.log import get_logger
from gradus.processes.log_tail import cause_in

LOCAL = "subprocess"
"""Type of the runtime whose processes we can see."""
LOOK_SECONDS = 0.1
"""Between two looks for the port of a local server."""
REMOTE_LOOK_SECONDS = 1.0
LIST_TIMEOUT_SECONDS = 60.0
START_SECONDS = 180.0
"""Without `timeout.setup_seconds`: what verifiers grants at least."""

log = get_logger(__name__)


@dataclass(frozen=True)
class ToolServerLimits:
    """What the config says."""

    start_seconds: float = START_SECONDS
    """For one server to serve."""
    max_at_once: int = 8
    """Servers that run in one worker."""


class ToolServerSlots:
    """Owns the room for tool servers of one worker.

    >>> async with slots.hold(1): ...  # doctest: +SKIP
    """

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
                "no tool server ended in %g s; going on with %d at once, more than "
                "pool.max_tool_servers = %d",
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
            "this worker (pool.max_tool_servers). Servers that know no task are cheaper in "
            "Taskset.toolsets: one for all episodes",
            self._limits.max_at_once,
        )


def slots_around(serve_tools: Callable[..., Any], slots: ToolServerSlots) -> Callable[..., Any]:
    """verifiers' `serve_tools`, which first waits for room for the servers that it starts."""

    @contextlib.asynccontextmanager
    async def serve_within(
        toolsets: Sequence[Any], *rest: Any, **more: Any
    ) -> AsyncIterator[dict[str, str]]:
        started = sum(not toolset.config.url for toolset in toolsets)
        async with slots.hold(started), serve_tools(toolsets, *rest, **more) as urls:
            yield urls

    return serve_within


def start_in_time(
    serve_in_runtime: Callable[..., Awaitable[int]], limits: ToolServerLimits
) -> Callable[..., Awaitable[int]]:
    """verifiers' `serve_in_runtime`, with a deadline and an error that begins with its cause."""

    async def serve_in_time(server: Any, runtime: Any, **options: Any) -> int:
        # A sandbox may have to install packages first, which has its own deadlines.
        seconds = limits.start_seconds if runtime.type == LOCAL else None
        name = server.server_name
        try:
            async with asyncio.timeout(seconds):
                return await serve_in_runtime(server, runtime, **options)
        except TimeoutError as error:
            raise ToolsetError(
                f"tool server {name!r} did not start in timeout.setup_seconds = {seconds:g}"
            ) from error
        except ToolsetError as error:
            cause = cause_in(str(error).splitlines())
            raise ToolsetError(f"tool server {name!r} did not start: {cause}\n{error}") from error

    return serve_in_time


async def read_port(runtime: Any, path: str, *, limits: ToolServerLimits) -> int:
    """The port in the file that a server writes; ToolsetError once a local server has ended.

    The file of a local server is removed: verifiers leaves it.
    """
    is_local = runtime.type == LOCAL
    started = getattr(runtime, "_background", ())
    server = started[-1] if is_local and started else None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.start_seconds
    while loop.time() < deadline:
        # Before the file is read: a server may write it and end.
        ended = None if server is None else server.returncode
        with contextlib.suppress(Exception):
            text = (await runtime.read(path)).decode().strip()
            if text.isdigit():
                if is_local:
                    Path(path).unlink(missing_ok=True)
                return int(text)
        if ended is not None:
            raise ToolsetError(f"it ended with exit code {ended}")
        await asyncio.sleep(LOOK_SECONDS if is_local else REMOTE_LOOK_SECONDS)
    raise ToolsetError(f"it named no port within {limits.start_seconds:g} s")


@dataclass(frozen=True)
class ToolCall:
    """A function call as the model wrote it."""

    id: str
    name: str
    raw_arguments: str

    @classmethod
    def from_wire(cls, call: dict[str, Any]) -> ToolCall:
        """The call in an assistant message of the chat dialect."""
        function = call.get("function") or {}
        return cls(
            id=call.get("id", ""),
            name=function.get("name", ""),
            raw_arguments=function.get("arguments") or "{}",
        )

    @property
    def arguments(self) -> Any:
        """The parsed arguments, or the raw text when it is not JSON."""
        try:
            return json.loads(self.raw_arguments)
        except ValueError:
            return self.raw_arguments

    def result(self, content: str | list[dict[str, Any]]) -> dict[str, Any]:
        """The message that answers this call, bounded as verifiers bounds its own."""
        message = {
            "role": "tool",
            "tool_call_id": self.id,
            "content": content,
            "name": self.name,
        }
        bounded: dict[str, Any] = bound_tool_message(message)
        return bounded


class ToolServers:
    """Owns the connections to the tool servers of one episode, over all its segments."""

    def __init__(
        self,
        schemas: list[dict[str, Any]],
        dispatch: dict[str, tuple[str, str]],
        servers: dict[str, MCPConnection],
    ) -> None:
        self.schemas = schemas
        """The tools as the chat dialect declares them; empty without servers."""
        self._dispatch = dispatch
        self._servers = servers

    @classmethod
    async def connect(
        cls, urls: Mapping[str, str], stack: AsyncExitStack, *, timeout_seconds: float
    ) -> ToolServers:
        """Connect to every server and list its tools; `stack` closes the connections."""
        if not urls:
            return cls([], {}, {})
        config = {
            "mcpServers": {
                name: {"url": url, "timeout": timeout_seconds} for name, url in urls.items()
            }
        }
        async with asyncio.timeout(LIST_TIMEOUT_SECONDS):
            schemas, dispatch, servers = await connect_mcp(config, stack)
        return cls(schemas, dispatch, servers)

    async def call(self, call: ToolCall) -> dict[str, Any]:
        """The tool message for one call; it tells the model what it got wrong."""
        if call.name not in self._dispatch:
            return call.result(f"error: unknown tool {call.name!r}")
        arguments = call.arguments
        if not isinstance(arguments, dict):
            return call.result(
                f"error: the arguments must be a JSON object, not {call.raw_arguments[:200]!r}; "
                "send the call again"
            )
        content = await call_mcp(self._servers, self._dispatch, call.name, arguments)
        return call.result(content)

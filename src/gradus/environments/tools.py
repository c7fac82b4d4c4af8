"""MCP tool servers of one episode: their tools as chat tools, and calls to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp

LIST_TIMEOUT_SECONDS = 60.0


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
        """The tool message for one call. What the model got wrong is told to the model."""
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

"""The tools of one episode: the calls of a reply, made at once or in order, and what they answer.

Whatever a model writes gets an answer that it can read: an unknown tool, arguments that are no
object, one call too many, a deadline, a tool that fails. Only a server that is gone ends the
episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
from verifiers.v1.errors import ToolsetError

from gradus.environments.harness.fitness import declaration
from gradus.environments.verifiers.tool_servers import ToolUrls
from gradus_chat.tool_client import ToolServer, open_server

MAX_SHOWN_CHARACTERS = 200
"""Of what a model wrote, when an error repeats it."""


@dataclass(frozen=True)
class ToolLimits:
    """What a turn may cost."""

    call_seconds: float
    """For one call."""
    max_calls: int
    """Calls of one reply that are made."""
    max_characters: int
    """Of one answer that the model reads."""


@dataclass(frozen=True)
class ToolCall:
    """A function call as the model wrote it."""

    id: str
    name: str
    raw_arguments: str

    @classmethod
    def from_wire(cls, call: dict[str, Any]) -> ToolCall:
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
        except (ValueError, RecursionError):
            return self.raw_arguments

    def result(self, content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.id, "content": content, "name": self.name}


@dataclass(frozen=True)
class _Tool:
    server: ToolServer
    name: str
    """What the server calls it."""
    is_free: bool
    """Whether its calls may overlap with others of the episode."""


class EpisodeTools:
    """Owns the connections to the tool servers of one episode, over all its segments."""

    def __init__(
        self, schemas: list[dict[str, Any]], tools: Mapping[str, _Tool], limits: ToolLimits
    ) -> None:
        self.schemas = schemas
        """The tools as the chat dialect declares them; empty without servers."""
        self._tools = dict(tools)
        self._limits = limits

    @classmethod
    async def connect(
        cls,
        urls: Mapping[str, str],
        http: aiohttp.ClientSession,
        stack: AsyncExitStack,
        limits: ToolLimits,
        *,
        disabled: Collection[str] = (),
    ) -> EpisodeTools:
        """Ask every server for its tools; `stack` closes what stays open.

        Calls to servers that belong to the episode, or keep its state, are made in order, the
        others at once.
        """
        schemas: list[dict[str, Any]] = []
        tools: dict[str, _Tool] = {}
        stateless = urls.stateless if isinstance(urls, ToolUrls) else frozenset()
        for server_name, url in urls.items():
            server = await open_server(server_name, url, http, stack, timeout=limits.call_seconds)
            for declared in server.tools:
                own_name = declared["name"]
                name = f"{server_name}_{own_name}" if server_name else own_name
                if name in disabled:
                    continue
                if name in tools:
                    raise ToolsetError(f"two tools are named {name!r}; give one server a prefix")
                tools[name] = _Tool(server, own_name, server_name in stateless)
                schemas.append(declaration(name, declared))
        return cls(schemas, tools, limits)

    def add(self, server: ToolServer) -> None:
        """Offer the tools of a server that needs no connection; their calls are made in order."""
        for declared in server.tools:
            self._tools[declared["name"]] = _Tool(server, declared["name"], is_free=False)
            self.schemas.append(declaration(declared["name"], declared))

    async def answer(
        self, calls: Sequence[ToolCall], decided: Mapping[int, dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The tool messages for the calls of one reply, in their order.

        `decided` holds messages that stand instead of a call, by its place.
        """
        answers: dict[int, dict[str, Any]] = {
            place: {**message, "content": self._bounded(message.get("content"))}
            for place, message in decided.items()
        }
        limit = self._limits.max_calls
        for place in range(limit, len(calls)):
            text = f"error: not run, a turn may make {limit} calls at most; make it in another turn"
            answers.setdefault(place, calls[place].result(text))
        to_make = [place for place in range(len(calls)) if place not in answers]

        async def make(places: Sequence[int]) -> None:
            for place in places:
                answers[place] = await self._call(calls[place])

        free = {p for p in to_make if (tool := self._tools.get(calls[p].name)) and tool.is_free}
        in_order = [place for place in to_make if place not in free]
        if len(free) < 2 and (not free or not in_order):
            await make(to_make)
        else:
            await _at_once([make([place]) for place in sorted(free)] + [make(in_order)])
        return [answers[place] for place in range(len(calls))]

    async def _call(self, call: ToolCall) -> dict[str, Any]:
        """The tool message for one call; it tells the model what it got wrong."""
        tool = self._tools.get(call.name)
        if tool is None:
            return call.result(f"error: unknown tool {_shown(call.name)}")
        arguments = call.arguments
        if not isinstance(arguments, dict):
            return call.result(
                f"error: the arguments must be a JSON object, not {_shown(call.raw_arguments)}; "
                "send the call again"
            )
        try:
            async with asyncio.timeout(self._limits.call_seconds):
                text = await tool.server.call(tool.name, arguments)
        except TimeoutError:
            seconds = self._limits.call_seconds
            return call.result(
                f"error: the tool gave no answer within {seconds:g} s, and was given up"
            )
        return call.result(self._bounded(text))

    def _bounded(self, content: Any) -> Any:
        """A text without its middle, where it is too long, and a note in its place."""
        limit = self._limits.max_characters
        if not isinstance(content, str) or len(content) <= limit:
            return content
        head, tail = limit - limit // 2, limit // 2
        left_out = len(content) - limit
        note = f"[{left_out} of {len(content)} characters are left out here]"
        return f"{content[:head]}\n{note}\n{content[len(content) - tail :]}"


def _shown(text: str) -> str:
    cut = text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."
    return repr(cut)


async def _at_once(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error, or a cancel, ends the others before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

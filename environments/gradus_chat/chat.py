"""The chat harness: a chat loop that runs inside the worker.

verifiers starts a program per episode; this loop is the same conversation as coroutines. It keeps
verifiers' contract: every model call goes through the rollout's interception endpoint with its
bearer, so limits, stops, rewrites and the recorded trace are those of any other harness.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, ClassVar

import aiohttp
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS

from gradus.environments.verifiers.in_process import address_of, local_server
from gradus.errors import EnvironmentFailure
from gradus.wire.episode import CONTEXT_FULL
from gradus_chat.model_calls import (
    Connections,
    Endpoint,
    HttpTransport,
    RetryPolicy,
    Transport,
)
from gradus_chat.tools import EpisodeTools, ToolCall, ToolLimits

TOOL_KEEP_ALIVE_SECONDS = 3.0
"""Of an idle connection to a tool server, which would close it after five."""
_DONE = vf.ProgramResult(exit_code=0, stdout="", stderr="")


MAX_SAID_CHARACTERS = 300
"""Of what the engine says about a prompt that is too long."""


class ContextFullError(Exception):
    """The messages are longer than the engine's context; its message is what the engine says."""


class ChatHarnessConfig(vf.HarnessConfig):
    """Settings of the chat harness."""

    id: str = "gradus-chat"
    """Id under which verifiers imports it."""
    max_retries: int = Field(2, ge=0)
    """Times that a model call is tried again after an error that may pass."""
    retry_delay_seconds: float = Field(0.5, gt=0)
    """Delay before the first of them; doubled each time, at most 8 s."""
    max_model_calls: int | None = Field(None, ge=1)
    """Model calls of one turn; tool calls of the last one are not made. None means no limit."""
    max_tool_calls: int = Field(16, ge=1)
    """Tool calls of one turn that are made; the others are told to come in another turn."""
    max_tool_characters: int = Field(20_000, ge=100)
    """Characters of one tool's answer that the model reads: its beginning and its end."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Plays a seat as a chat: text, tool calls, and several segments with a user between them."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    connections: ClassVar[Connections] = Connections()
    """On the class, because verifiers makes a harness for every episode."""
    tool_connections: ClassVar[Connections] = Connections(TOOL_KEEP_ALIVE_SECONDS)

    @property
    def session_type(self) -> type[ChatSession]:
        return ChatSession

    async def session(self, *args: Any, **kwargs: Any) -> ChatSession:
        """The conversation of one rollout, its tool servers connected."""
        stack = AsyncExitStack()
        try:
            return await self.session_type.open(self, stack, *args, **kwargs)
        except BaseException:
            await stack.aclose()
            raise

    async def launch(self, *args: Any, **kwargs: Any) -> vf.ProgramResult:
        session = await self.session(*args, **kwargs)
        try:
            return await session.play(None)
        finally:
            await session.close()


class ChatSession(vf.HarnessSession):
    """Owns the conversation of one rollout over all its segments.

    >>> session = await harness.session(ctx, trace, runtime, endpoint, secret, urls, data)
    >>> await session.turn()  # the model answers the task's prompt
    >>> await session.turn([vf.UserMessage(content="Go on.")])
    """

    def __init__(
        self, *args: Any, model: Endpoint, tools: EpisodeTools, stack: AsyncExitStack, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._model = model
        self._tools = tools
        self._stack = stack
        self._conversation: list[dict[str, Any]] = []
        self._used_tokens = 0
        """Prompt and reply of the last call."""

    @classmethod
    async def open(
        cls, harness: ChatHarness, stack: AsyncExitStack, *args: Any, **kwargs: Any
    ) -> ChatSession:
        """Connect to the tool servers and to the interception server; `stack` closes both."""
        bare = vf.HarnessSession(harness, *args, **kwargs)
        config = harness.config
        # This loop runs out here, also where the episode's endpoint is one inside a container.
        url = address_of(bare.secret) or bare.endpoint
        transport: Transport | None = local_server(url)
        if transport is None:
            transport = HttpTransport(await stack.enter_async_context(harness.connections.lease()))
        model = Endpoint(
            transport=transport,
            url=url,
            secret=bare.secret,
            retry=RetryPolicy(config.max_retries, config.retry_delay_seconds),
        )
        limits = ToolLimits(config.tool_timeout, config.max_tool_calls, config.max_tool_characters)
        tools = EpisodeTools([], {}, limits)
        if bare.mcp_urls:
            http = await stack.enter_async_context(harness.tool_connections.lease())
            disabled = config.disabled_tools or ()
            tools = await EpisodeTools.connect(
                bare.mcp_urls, http, stack, limits, disabled=disabled
            )
        return cls(harness, *args, model=model, tools=tools, stack=stack, **kwargs)

    async def close(self) -> None:
        """Close the connections; twice is harmless."""
        await super().close()
        await self._stack.aclose()

    async def _run(self, messages: vf.Messages | None) -> vf.ProgramResult:
        return await self.play(messages)

    async def play(self, messages: vf.Messages | None) -> vf.ProgramResult:
        """Play one segment: up to a reply without tool calls, or until the rollout stops.

        `messages` are what the user says; None plays the task's own prompt.
        """
        if not self._conversation:
            self._conversation = self._opening(is_prompted=messages is None)
        self._conversation.extend(message_to_wire(message) for message in messages or ())
        num_calls = 0
        while True:
            num_calls += 1
            try:
                reply = await self._next()
            except aiohttp.ClientError as error:
                return vf.ProgramResult(
                    exit_code=MODEL_TRANSPORT_ERROR_EXIT_CODE,
                    stdout="",
                    stderr=f"{type(error).__name__}: {error}",
                )
            if reply is None:
                return _DONE
            self._conversation.append(reply)
            if not reply.get("tool_calls"):
                return _DONE
            calls = [ToolCall.from_wire(call) for call in reply["tool_calls"]]
            if num_calls == self.harness.config.max_model_calls:
                # A conversation in which a call stays open is refused by other models' endpoints.
                self._conversation += [_not_made(call) for call in calls]
                return _DONE
            self._conversation += await self._tools.answer(calls, await self._denied(calls))

    def _opening(self, *, is_prompted: bool) -> list[dict[str, Any]]:
        system, prompt = self.harness.resolve_prompt(self.data)
        opening = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str) and is_prompted:
            opening.append({"role": "user", "content": prompt})
        elif prompt is not None and is_prompted:
            opening.extend(message_to_wire(message) for message in prompt)
        return opening

    async def _next(self) -> dict[str, Any] | None:
        try:
            return await self._ask(self._conversation)
        except ContextFullError as full:
            self.trace.info[CONTEXT_FULL] = str(full)[:MAX_SAID_CHARACTERS]
            self.trace.stop(CONTEXT_FULL)
            return None

    async def _ask(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """What the model answers to `messages`; None when the rollout ended instead.

        Raises ContextFullError when they are longer than the engine's context.
        """
        body: dict[str, Any] = {"model": self.ctx.model, "messages": messages}
        if self._tools.schemas:
            body["tools"] = self._tools.schemas
        reply = await self._model.complete(body)
        if reply.is_ok:
            self._used_tokens = (reply.payload.get("usage") or {}).get("total_tokens") or 0
            message: dict[str, Any] = reply.payload["choices"][0]["message"]
            return message
        if self.trace.stop_condition is not None:
            return None
        if is_context_overflow(reply.status, reply.error_text):
            raise ContextFullError(reply.error_text)
        raise EnvironmentFailure(f"the model call failed, {reply.error_text}")

    async def _denied(self, calls: Sequence[ToolCall]) -> dict[int, dict[str, Any]]:
        """Messages that the environment puts in place of calls, by their place."""
        denied: dict[int, dict[str, Any]] = {}
        if self.tool_interception_url is None:
            return denied
        for place, call in enumerate(calls):
            verdict = await self._model.ask_gate(
                self.tool_interception_url,
                {"tool_call_id": call.id, "name": call.name, "arguments": call.arguments},
            )
            action = verdict.payload.get("action")
            if not verdict.is_ok or action == "stop":
                reason = verdict.payload.get("reason", verdict.error_text)
                raise EnvironmentFailure(f"the tool call {call.name!r} was stopped: {reason}")
            if action == "deny":
                denied[place] = verdict.payload["message"]
        return denied


def _not_made(call: ToolCall) -> dict[str, Any]:
    text = "This call was not made: the turn is over."
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def is_context_overflow(status: int, text: str) -> bool:
    """Whether an error says that the prompt is longer than the engine's context."""
    if status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        return False
    said = text.casefold()
    return any(marker in said for marker in CONTEXT_OVERFLOW_MARKERS)

"""The door between a program and the model: what may pass, what is refused with a sentence.

A program of somebody else posts whatever its library makes up. The door listens on loopback for one
episode, reads each request, and hands chat completions on to verifiers' interception server, which
plays and records them. All other requests are answered here, in one sentence that says what trains.

The interception server parses and validates on the event loop that all episodes of the worker
share, so the door bounds what reaches it: by the model's context, by number, and by rate.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from verifiers.v1.dialects import ChatDialect

from gradus.environments.harness.chat import is_context_overflow

MAX_REQUEST_BYTES = 16 * 1024**2
"""Where the model's context is not known."""
BYTES_PER_TOKEN = 16
"""Of JSON; text has about four, escaped characters of other alphabets up to ten."""
SPARE_BYTES = 65_536
MAX_MESSAGES = 4096
"""Of one request, with the parts and the tool calls in them."""
MAX_TOOLS = 512
CALLS_PER_SECOND = 20.0
"""Of one episode; what is faster waits, except for the first `BURST_SECONDS` of it."""
BURST_SECONDS = 10.0
MAX_REFUSALS = 5
"""Kept of the answers to requests that cannot be played; all are counted."""
MAX_REFUSAL_CHARACTERS = 500
INLINE_BYTES = 16_384
"""A larger request is checked on a thread."""
CONNECT_SECONDS = 30.0
"""Counts what blocks this worker too."""
MODELS_SECONDS = 10.0
_CHAT = "/chat/completions"
_MODELS = "/models"
_HOP_HEADERS = {
    *("host", "connection", "content-length", "transfer-encoding", "accept-encoding"),
    *("keep-alive", "te", "trailer", "upgrade", "expect"),
}
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_NO_SAMPLING = {"n", "service_tier"}
_NOT_SENT = {
    "/embeddings": "Embeddings are not served: the endpoint is the language model that trains.",
    "/responses": "The Responses API is not served; ask for chat completions.",
    "/messages": "Anthropic's Messages API is not served; ask for chat completions.",
    "/completions": "Plain completions are not served; ask for chat completions.",
}
_REST = "Only POST /v1/chat/completions and GET /v1/models are served here."
_ENGINE_FAULTS = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_ERROR_EVENT = b'data: {"error"'
_ROLLOUT_OVER = ("rollout stopped", "rollout concluded")

_DIALECT = ChatDialect()


class Refused(Exception):
    """A request that cannot be played; its text is the answer."""


@dataclass
class Traffic:
    """What went through a door."""

    num_answered: int = 0
    """Model calls that got a reply."""
    num_unread: int = 0
    """Model calls that the program left before their reply; they do not train."""
    num_refused: int = 0
    """Requests that cannot be played."""
    refused: list[str] = field(default_factory=list)
    """The answers to the first of them, and to the last."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Name of a sampling parameter → calls in which the program's value was not used."""
    faults: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """Conversation → status and text of a call that failed for no fault of the program; gone when
    the same conversation got its reply."""
    is_full: bool = False
    """Whether the last call was longer than the engine's context."""

    def refuse(self, text: str) -> None:
        """Count a request that cannot be played."""
        self.num_refused += 1
        del self.refused[MAX_REFUSALS - 1 :]
        self.refused.append(text[:MAX_REFUSAL_CHARACTERS])


@dataclass(frozen=True)
class Call:
    """One chat completion that can be played."""

    content: bytes
    conversation: bytes
    """Digest of its messages and tools; the same for each try."""


@dataclass
class Door:
    """One open door: where it is, where it leads, and what went through."""

    upstream: str
    """The rollout's endpoint at the interception server, with `/v1`."""
    sampling: Mapping[str, Any]
    """The source's own sampling, by the names of chat completions."""
    is_training: bool
    """Whether the calls train: then no parameter that the source leaves open reaches the model."""
    http: aiohttp.ClientSession
    context_tokens: int | None = None
    url: str = ""
    traffic: Traffic = field(default_factory=Traffic)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _paid_until: float = 0.0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        upstream: str,
        *,
        sampling: Mapping[str, Any],
        is_training: bool,
        context_tokens: int | None = None,
    ) -> AsyncIterator[Door]:
        """Listen on loopback until the end of the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as http:
            door = cls(upstream, sampling, is_training, http, context_tokens)
            app = web.Application(client_max_size=door.max_bytes)
            app.router.add_route("*", "/{path:.*}", door._answer)
            # A program that leaves a call has it cancelled: here, at the interception server and
            # in the engine.
            runner = web.AppRunner(
                app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
            )
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                door.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
                yield door
            finally:
                await runner.cleanup()

    @property
    def max_bytes(self) -> int:
        """Size up to which a request is read."""
        if self.context_tokens is None:
            return MAX_REQUEST_BYTES
        return min(self.context_tokens * BYTES_PER_TOKEN + SPARE_BYTES, MAX_REQUEST_BYTES)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await self._wait_for_turn()
        path = request.path.rstrip("/")
        if request.method == "GET" and path.endswith(_MODELS):
            return await self._pass(request, _MODELS, None)
        try:
            if not path.endswith(_CHAT):
                raise Refused(_refusal_of(path))
            call = await self._read(request)
        except Refused as refused:
            return self._refuse(str(refused))
        try:
            return await self._pass(request, _CHAT, call)
        except asyncio.CancelledError:
            self.traffic.num_unread += 1
            raise

    async def _wait_for_turn(self) -> None:
        """Slow a program that asks in a loop: the worker's other episodes need the processor too.

        waits for: the time that its calls before this one are worth
        """
        now = asyncio.get_running_loop().time()
        self._paid_until = max(self._paid_until, now) + 1 / CALLS_PER_SECOND
        if (ahead := self._paid_until - now - BURST_SECONDS) > 0:
            await asyncio.sleep(ahead)

    def _refuse(self, text: str) -> web.Response:
        self.traffic.is_full = is_context_overflow(HTTPStatus.BAD_REQUEST, text)
        self.traffic.refuse(text)
        return web.json_response(_error(text), status=HTTPStatus.BAD_REQUEST)

    async def _read(self, request: web.Request) -> Call:
        """The body as it is handed on; Refused for one that cannot be played."""
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise Refused(
                f"The request is longer than the model's maximum context length of "
                f"{self.context_tokens or 'unknown'} tokens: more than {self.max_bytes} bytes."
            ) from error
        if len(raw) <= INLINE_BYTES:
            return self._playable(raw)
        # One after the other: the threads of the worker belong to all its episodes.
        async with self._reading:
            return await asyncio.to_thread(self._playable, raw)

    def _playable(self, raw: bytes) -> Call:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refused("The body is not JSON.") from error
        changed = _check(body, text_only=self.is_training)
        for name in self._dropped(body):
            self.traffic.dropped[name] += 1
        asked = json.dumps([body["messages"], body.get("tools")]).encode()
        return Call(
            content=json.dumps(body).encode() if changed else raw,
            conversation=hashlib.blake2b(asked, digest_size=16).digest(),
        )

    def _dropped(self, body: Mapping[str, Any]) -> list[str]:
        """Sampling parameters whose value is not the one that the model samples with."""
        given = {
            ("max_tokens" if name == "max_completion_tokens" else name): value
            for name, value in body.items()
            if name in _DIALECT.sampling_fields and name not in _NO_SAMPLING and value is not None
        }
        return sorted(
            name
            for name, value in given.items()
            if (name in self.sampling or self.is_training)
            and self.sampling.get(name) != value
            and not _changes_nothing(name, value)
        )

    async def _pass(
        self, request: web.Request, route: str, call: Call | None
    ) -> web.StreamResponse:
        """The interception server's own answer, streamed on as it comes."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        content = None if call is None else call.content
        try:
            async with self.http.request(
                request.method, f"{self.upstream}{route}", data=content, headers=headers
            ) as answer:
                if answer.content_type == "text/event-stream" and call is not None:
                    return await self._relay(request, answer, call)
                raw = await answer.read()
        except aiohttp.ClientError as error:
            text = f"{type(error).__name__}: {error}"
            self._note(HTTPStatus.BAD_GATEWAY, text, call)
            return web.json_response(_error(text), status=HTTPStatus.BAD_GATEWAY)
        self._note(answer.status, _text_of(raw), call)
        kind = answer.headers.get("Content-Type", "application/json")
        return web.Response(status=answer.status, body=raw, headers={"Content-Type": kind})

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, call: Call
    ) -> web.StreamResponse:
        """A stream of events. What fails once it has begun is an event, or ends it."""
        stream = web.StreamResponse(status=answer.status)
        stream.headers["Content-Type"] = answer.headers["Content-Type"]
        stream.headers["Cache-Control"] = "no-cache"
        await stream.prepare(request)
        status, text = answer.status, ""
        chunks = answer.content.iter_any()
        while True:
            try:
                chunk = await anext(chunks, b"")
            except aiohttp.ClientError as error:
                status, text = HTTPStatus.BAD_GATEWAY, f"{type(error).__name__}: {error}"
                chunk = f"data: {json.dumps(_error(text))}\n\n".encode()
            if not chunk:
                break
            if chunk.startswith(_ERROR_EVENT):
                text = _text_of(chunk.removeprefix(b"data: "))
                is_over = text.startswith(_ROLLOUT_OVER)
                status = HTTPStatus.BAD_REQUEST if is_over else HTTPStatus.BAD_GATEWAY
            try:
                await stream.write(chunk)
            except ConnectionError:  # the program has left
                self.traffic.num_unread += 1
                return stream
        self._note(status, text, call)
        await stream.write_eof()
        return stream

    def _note(self, status: int, text: str, call: Call | None) -> None:
        if call is None:
            return
        self.traffic.is_full = is_context_overflow(status, text)
        if status == HTTPStatus.OK:
            self.traffic.num_answered += 1
            self.traffic.faults.pop(call.conversation, None)
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _ENGINE_FAULTS:
            self.traffic.faults[call.conversation] = (status, text)
        else:
            self.traffic.refuse(text)


async def served_context(upstream: str, bearer: str, model: str) -> int | None:
    """The context of a model, as vLLM's list of models says it; None where that says nothing.

    Raises aiohttp.ClientError and TimeoutError where there is no list.
    """
    timeout = aiohttp.ClientTimeout(total=MODELS_SECONDS)
    headers = {"Authorization": f"Bearer {bearer}"}
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
        http.get(f"{upstream}{_MODELS}", headers=headers) as answer,
    ):
        raw = await answer.read()
    try:
        cards = json.loads(raw)["data"]
        (length,) = {card["max_model_len"] for card in cards if card["id"] == model}
    except (ValueError, KeyError, TypeError):
        return None
    return length if isinstance(length, int) and length > 0 else None


def _refusal_of(path: str) -> str:
    for end, text in _NOT_SENT.items():
        if path.endswith(end):
            return f"{text} {_REST}"
    return f"There is nothing at {path[:200]}. {_REST}"


def _check(body: object, *, text_only: bool = True) -> bool:
    """Refused for a body that cannot be played; whether it was changed so that it can."""
    if not isinstance(body, dict):
        raise Refused("The body must be a JSON object.")
    changed = False
    if body.get("n", 1) is None:
        del body["n"]
        changed = True
    if body.get("n", 1) != 1:
        raise Refused(
            f"n = {str(body['n'])[:20]} is not supported: each call is one reply, because each "
            "reply trains as a separate turn. Make several calls instead."
        )
    if body.get("functions") or body.get("function_call"):
        raise Refused("`functions` is not supported; use `tools`.")
    changed |= _check_messages(body.get("messages"), text_only=text_only)
    _check_tools(body.get("tools") or [])
    try:
        # Half a surrogate pair is JSON, and no tokenizer takes it.
        json.dumps(body, ensure_ascii=False).encode()
        _DIALECT.parse_request(body)
    except Exception as error:  # whatever a hostile body makes the library stumble over
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"The request cannot be read ({text[:300]}).") from error
    return changed


def _check_messages(messages: object, *, text_only: bool) -> bool:
    if not isinstance(messages, list) or not messages:
        raise Refused("`messages` must be a list with at least one message.")
    changed = False
    num_parts = 0
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise Refused(f"A message has the role {str(role)[:40]!r}; known are: {known}.")
        if role == "developer":
            message["role"] = "system"
            changed = True
        inner = [message.get(key) for key in ("content", "tool_calls", "reasoning_details")]
        parts = [part for listed in inner if isinstance(listed, list) for part in listed]
        num_parts += 1 + len(parts)
        if num_parts > MAX_MESSAGES:
            raise Refused(f"More than {MAX_MESSAGES} messages, parts and tool calls at once.")
        kinds = [part.get("type") for part in parts if isinstance(part, dict)]
        if text_only and "image_url" in kinds:
            raise Refused("The model that trains reads text; a message holds an image.")
    return changed


def _check_tools(tools: object) -> None:
    listed = tools if isinstance(tools, list) else [tools]
    if len(listed) > MAX_TOOLS:
        raise Refused(f"{len(listed)} tools at once; at most {MAX_TOOLS} are supported.")
    for tool in listed:
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise Refused("Only tools of type `function` are supported.")


def _changes_nothing(name: str, value: object) -> bool:
    """Whether a parameter asks for what happens anyway."""
    nothing: dict[str, tuple[object, ...]] = {
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "top_p": (1,),
        "stop": ([],),
        "logit_bias": ({},),
        "extra_body": ({},),
        "response_format": ({"type": "text"},),
    }
    return any(value == harmless for harmless in nothing.get(name, ()))


def _error(text: str) -> dict[str, Any]:
    """An error as OpenAI's and Anthropic's libraries read it."""
    return {"type": "error", "error": {"type": "invalid_request_error", "message": text}}


def _text_of(raw: bytes) -> str:
    try:
        payload = json.loads(raw)
        error = payload["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return raw[:500].decode(errors="replace")

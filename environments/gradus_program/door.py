"""The door between a program and the model: what may pass, what is refused with a sentence.

A program of somebody else posts whatever its library makes up. The door listens on loopback for one
episode, reads each request, and hands chat completions on to verifiers' interception server, which
plays and records them. All other requests are answered here, in one sentence that says what trains.
"""

from __future__ import annotations

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

MAX_REQUEST_BYTES = 64 * 1024**2
CONNECT_SECONDS = 5.0
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

_DIALECT = ChatDialect()


class Refused(Exception):
    """A request that cannot be played; its text is the answer."""


@dataclass
class Traffic:
    """What went through a door."""

    num_answered: int = 0
    """Model calls that got a reply."""
    refused: list[str] = field(default_factory=list)
    """Answers to requests that cannot be played, in order."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Name of a sampling parameter → calls in which the program's value was not used."""
    engine_fault: tuple[int, str] | None = None
    """Status and text of a call that failed for no fault of the program; None again after a call
    that succeeded."""
    is_full: bool = False
    """Whether the last call was longer than the engine's context."""


@dataclass
class Door:
    """One open door: where it is, where it leads, and what went through."""

    upstream: str
    """The rollout's endpoint at the interception server, with `/v1`."""
    sampling: Mapping[str, Any]
    """The source's own sampling, by the names of chat completions."""
    keeps_others: bool
    """Whether parameters that the source leaves open reach the model; not when it trains."""
    http: aiohttp.ClientSession
    url: str = ""
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, upstream: str, *, sampling: Mapping[str, Any], keeps_others: bool
    ) -> AsyncIterator[Door]:
        """Listen on loopback until the end of the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as http:
            door = cls(upstream, sampling, keeps_others, http)
            app = web.Application(client_max_size=MAX_REQUEST_BYTES)
            app.router.add_route("*", "/{path:.*}", door._answer)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                door.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
                yield door
            finally:
                await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/")
        if request.method == "GET" and path.endswith(_MODELS):
            return await self._pass(request, _MODELS, None)
        try:
            if not path.endswith(_CHAT):
                raise Refused(_refusal_of(path))
            content = self._playable(await request.read())
        except Refused as refused:
            self.traffic.refused.append(str(refused))
            return web.json_response(_error(str(refused)), status=HTTPStatus.BAD_REQUEST)
        return await self._pass(request, _CHAT, content)

    def _playable(self, raw: bytes) -> bytes:
        """The body as it is handed on; Refused for one that cannot be played."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refused("The body is not JSON.") from error
        changed = _check(body)
        for name in self._dropped(body):
            self.traffic.dropped[name] += 1
        return json.dumps(body).encode() if changed else raw

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
            if (name in self.sampling or not self.keeps_others)
            and self.sampling.get(name) != value
            and not _changes_nothing(name, value)
        )

    async def _pass(
        self, request: web.Request, route: str, content: bytes | None
    ) -> web.StreamResponse:
        """The interception server's own answer, streamed on as it comes."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        try:
            async with self.http.request(
                request.method, f"{self.upstream}{route}", data=content, headers=headers
            ) as answer:
                return await self._relay(request, answer, is_call=content is not None)
        except aiohttp.ClientError as error:
            text = f"{type(error).__name__}: {error}"
            self.traffic.engine_fault = (HTTPStatus.BAD_GATEWAY, text)
            return web.json_response(_error(text), status=HTTPStatus.BAD_GATEWAY)

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse, *, is_call: bool
    ) -> web.StreamResponse:
        kind = answer.headers.get("Content-Type", "application/json")
        if answer.content_type != "text/event-stream":
            raw = await answer.read()
            if is_call:
                self._note(answer.status, raw)
            return web.Response(status=answer.status, body=raw, headers={"Content-Type": kind})
        stream = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
        stream.headers["Cache-Control"] = "no-cache"
        await stream.prepare(request)
        async for chunk in answer.content.iter_any():
            await stream.write(chunk)
        self._note(answer.status, b"")
        await stream.write_eof()
        return stream

    def _note(self, status: int, raw: bytes) -> None:
        self.traffic.is_full = is_context_overflow(status, _text_of(raw))
        if status == HTTPStatus.OK:
            self.traffic.num_answered += 1
            self.traffic.engine_fault = None
            return
        text = _text_of(raw)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _ENGINE_FAULTS:
            self.traffic.engine_fault = (status, text)
        else:
            self.traffic.refused.append(text)


def _refusal_of(path: str) -> str:
    for end, text in _NOT_SENT.items():
        if path.endswith(end):
            return f"{text} {_REST}"
    return f"There is nothing at {path[:200]}. {_REST}"


def _check(body: object) -> bool:
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
            "reply trains as a turn of its own. Make several calls instead."
        )
    if body.get("functions") or body.get("function_call"):
        raise Refused("`functions` is not supported; use `tools`.")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("`messages` must be a list with at least one message.")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(sorted(_ROLES))
            raise Refused(f"A message has the role {str(role)[:40]!r}; known are: {known}.")
        if role == "developer":
            message["role"] = "system"
            changed = True
    tools = body.get("tools") or []
    for tool in tools if isinstance(tools, list) else [tools]:
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise Refused("Only tools of type `function` are supported.")
    try:
        # Half a surrogate pair is JSON, and no tokenizer takes it.
        json.dumps(body, ensure_ascii=False).encode()
        _DIALECT.parse_request(body)
    except Exception as error:  # whatever a hostile body makes the library stumble over
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"The request cannot be read ({text[:300]}).") from error
    return changed


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

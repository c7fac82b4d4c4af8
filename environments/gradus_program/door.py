"""The door between a program and the model: what may pass, what is refused with a sentence.

A program of somebody else posts whatever its library makes up. The door listens on loopback for one
episode, reads each request in its dialect, and hands it as a chat completion to verifiers'
interception server, which plays and records it. All other requests are answered here, in one
sentence that says what is served.

The interception server parses and validates on the event loop that all episodes of the worker
share, so the door bounds what reaches it: by the model's context, by number, and by rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

from gradus.environments.policy.live import HEADER, Listeners, ReplyStart
from gradus.wire.episode import ASKED_SAMPLING, TURN
from gradus_chat.chat import is_context_overflow
from gradus_program.asked import UNABLE, granted, wishes
from gradus_program.messages import MessagesCall, MessagesCount
from gradus_program.responses import ResponsesCall, ResponsesCount
from gradus_program.speech import (
    Memory,
    ProgramCall,
    Refused,
    reply_of,
    rest_of,
    said_in,
    unreadable,
)

MAX_REQUEST_BYTES = 16 * 1024**2
"""Where the model's context is not known."""
BYTES_PER_TOKEN = 16
"""Of JSON; text has about four, escaped characters of other alphabets up to ten."""
SPARE_BYTES = 65_536
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
STREAM_SECONDS = 1.0
"""A reply that takes longer begins its stream before it is known; an error keeps its status till
then."""
PULSE_SECONDS = 3.0
"""Between two signs of life in such a stream."""
_CHAT = "/chat/completions"
_MODELS = "/models"
_HOP_HEADERS = {
    *("host", "connection", "content-length", "transfer-encoding", "accept-encoding"),
    *("keep-alive", "te", "trailer", "upgrade", "expect", "x-api-key", HEADER.lower()),
}
_SPEECH: Mapping[str, type[ProgramCall]] = {
    _CHAT: ProgramCall,
    "/responses": ResponsesCall,
    "/responses/input_tokens": ResponsesCount,
    "/messages": MessagesCall,
    "/messages/count_tokens": MessagesCount,
}
"""End of a path → what it asks."""
_NOT_SENT = {
    "/embeddings": "Embeddings are not served: the endpoint is the language model that trains.",
    "/completions": "Plain completions are not served; ask for chat completions.",
    "/responses/compact": "Compaction is not served; send a shorter conversation.",
}
_REST = (
    "Only POST /v1/chat/completions, /v1/responses and /v1/messages, and GET /v1/models are served "
    "here."
)
_ENGINE_FAULTS = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_ERRORS |= {408: "timeout_error", 409: "invalid_request_error", 429: "rate_limit_error"}

Count = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], Awaitable[int]]
"""Number of tokens of a prompt with these messages and tools."""


@dataclass
class Traffic:
    """Counts what went through a door."""

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
    dialects: Counter[str] = field(default_factory=Counter)
    """End of the path → calls that got a reply."""
    num_streams: int = 0
    """Of these, those whose reply was a stream."""
    faults: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """Conversation → status and text of a call that failed for no fault of the program; gone when
    the same conversation got its reply."""
    is_full: bool = False
    """True if the last call was longer than the engine's context."""
    on_read: Callable[[int], None] = int
    """Hears the number of each turn whose reply was read."""

    def refuse(self, text: str) -> None:
        """Count a request that cannot be played."""
        self.num_refused += 1
        del self.refused[MAX_REFUSALS - 1 :]
        self.refused.append(text[:MAX_REFUSAL_CHARACTERS])

    def read(self, answer: Answer) -> None:
        """Say that an answer was written to a program that was there."""
        if answer.turn is not None:
            self.on_read(answer.turn)


@dataclass(frozen=True)
class Answer:
    """The end of a call: its status, and a chat completion or an error."""

    status: int
    body: dict[str, Any]
    turn: int | None = None
    """Its number, where somebody wants to hear whether it was read."""


class News:
    """The part of a growing reply that was told and not passed on yet."""

    def __init__(self) -> None:
        self.said = ReplyStart()
        self.is_new = asyncio.Event()
        self.is_anew = False
        """True if the engine began the reply again."""

    def tell(self, said: ReplyStart | None) -> None:
        """Note how the reply begins; None says that it begins again."""
        self.is_anew |= said is None
        if said is not None:
            self.said = said
            self.is_new.set()

    def take(self) -> ReplyStart:
        """Return what was told last."""
        self.is_new.clear()
        return self.said

    async def wait(self, asking: asyncio.Task[Answer], seconds: float) -> None:
        """Until there is more, or the answer, or the time is over."""
        waiting = asyncio.create_task(self.is_new.wait())
        await asyncio.wait({asking, waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()


@dataclass
class Door:
    """One open door: where it is, where it leads, and what went through."""

    upstream: str
    """The rollout's endpoint at the interception server, with `/v1`."""
    sampling: Mapping[str, Any]
    """The source's own sampling, by the names of chat completions."""
    is_training: bool
    """True if the calls train: then no parameter that the source leaves open reaches the model."""
    http: aiohttp.ClientSession
    context_tokens: int | None = None
    count: Count | None = None
    """None where nobody can count tokens."""
    program_decides: bool = False
    """True if calls that train are sampled as the program asks, where it asks."""
    forces_calls: bool = False
    """True if a reply can then be made to call a tool."""
    url: str = ""
    traffic: Traffic = field(default_factory=Traffic)
    memory: Memory = field(default_factory=Memory)
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
        **more: Any,
    ) -> AsyncIterator[Door]:
        """Listen on loopback until the end of the block; `more` are fields of the door."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as http:
            door = cls(upstream, sampling, is_training, http, **more)
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
            answer = await self._ask(request, _MODELS, None)
            return _json(answer.body, answer.status)
        try:
            kind = next((kind for end, kind in _SPEECH.items() if path.endswith(end)), None)
            if kind is None or request.method != "POST":
                raise Refused(_refusal_of(path))
            call = await self._read(request, kind)
            if call.wants_count:
                return await self._count(call)
        except Refused as refused:
            return self._refuse(str(refused))
        news = News()
        with Listeners.added(news.tell) as headers:
            if call.is_streamed and self.is_training:
                call.headers = headers
            return await self._serve(request, call, news)

    async def _serve(
        self, request: web.Request, call: ProgramCall, news: News
    ) -> web.StreamResponse:
        asking = asyncio.create_task(self._play(request, call, news))
        try:
            return await self._give(request, call, asking, news)
        except ConnectionError:
            self.traffic.num_unread += 1
            return web.Response()  # to nobody
        except asyncio.CancelledError:
            self.traffic.num_unread += 1
            raise
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

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
        return _json(_error(text), HTTPStatus.BAD_REQUEST)

    async def _read(self, request: web.Request, kind: type[ProgramCall]) -> ProgramCall:
        """Read what is asked; Refused for what cannot be played."""
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise Refused(
                f"The request is longer than the model's maximum context length of "
                f"{self.context_tokens or 'unknown'} tokens: more than {self.max_bytes} bytes."
            ) from error
        if len(raw) <= INLINE_BYTES:
            return self._playable(raw, kind)
        # One after the other: the threads of the worker belong to all its episodes.
        async with self._reading:
            return await asyncio.to_thread(self._playable, raw, kind)

    def _playable(self, raw: bytes, kind: type[ProgramCall]) -> ProgramCall:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refused("The body is not JSON.") from error
        call = kind.read_safely(body, self.memory)
        call.check(text_only=self.is_training)
        self._settle_sampling(call)
        self.memory.compare(call.chat["messages"])
        return call

    def _settle_sampling(self, call: ProgramCall) -> None:
        """Decide what is done of what the call wishes, and count what is not."""
        call.chat.pop(ASKED_SAMPLING, None)
        wished = wishes({**call.chat, **call.beside}, self.sampling)
        if not self.is_training:
            # The engine of somebody else hears all that the source leaves open.
            wished = {name: wished[name] for name in wished if name in self.sampling}
        elif self.program_decides:
            tools = call.chat.get("tools", []) if self.forces_calls else None
            call.chat[ASKED_SAMPLING] = granted(wished, self.sampling, tools)
            wished = {name: wished[name] for name in wished if name in UNABLE}
        self.traffic.dropped.update(wished.keys())

    async def _count(self, call: ProgramCall) -> web.Response:
        if self.count is None:
            raise Refused("Tokens can be counted only where the model trains.")
        try:
            number = await self.count(call.chat["messages"], call.chat.get("tools"))
        except Exception as error:  # what no template takes
            raise unreadable(error) from error
        return _json(call.counted(number))

    async def _play(self, request: web.Request, call: ProgramCall, news: News) -> Answer:
        """The answer to a call, as the program reads it."""
        answer = await self._ask(request, _CHAT, call)
        if answer.status == HTTPStatus.OK:
            try:
                message, _ = reply_of(answer.body)
                self.memory.keep(message)
                turn = answer.body.pop(TURN, None)
                answer = Answer(answer.status, call.answer(answer.body), turn)
                if not _goes_on(call.said, said_in(message)):
                    answer = _changed(is_anew=news.is_anew)
            except (LookupError, TypeError, AttributeError) as error:
                answer = Answer(HTTPStatus.BAD_GATEWAY, _error(f"no completion: {error!r}", 502))
        self._note(answer, call)
        return answer

    async def _give(
        self, request: web.Request, call: ProgramCall, asking: asyncio.Task[Answer], news: News
    ) -> web.StreamResponse:
        """The answer, whole or as events. What fails once a stream has begun is an event."""
        if call.is_streamed:
            await news.wait(asking, STREAM_SECONDS)
        else:
            await asyncio.wait({asking})
        if asking.done() and (not call.is_streamed or asking.result().status != HTTPStatus.OK):
            answer = asking.result()
            whole = _json(answer.body, answer.status)
            await whole.prepare(request)
            _check_open(request)
            await whole.write_eof()
            self.traffic.read(answer)
            return whole
        stream = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await stream.prepare(request)
        await stream.write(call.opening())
        while not asking.done():
            is_new = news.is_new.is_set()
            await stream.write(call.tell(news.take()) if is_new else call.pulse())
            await news.wait(asking, PULSE_SECONDS)
        answer = asking.result()
        is_good = answer.status == HTTPStatus.OK
        _check_open(request)
        await stream.write((call.events if is_good else call.failure)(answer.body))
        self.traffic.num_streams += is_good
        self.traffic.read(answer)
        with contextlib.suppress(ConnectionError):  # after its last event
            await stream.write_eof()
        return stream

    async def _ask(self, request: web.Request, route: str, call: ProgramCall | None) -> Answer:
        """Wait for the answer of the interception server."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        if (key := request.headers.get("x-api-key")) and "Authorization" not in request.headers:
            headers["Authorization"] = f"Bearer {key}"
        headers |= {} if call is None else call.headers
        content = None if call is None else json.dumps(call.chat).encode()
        try:
            async with self.http.request(
                request.method, f"{self.upstream}{route}", data=content, headers=headers
            ) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            return Answer(HTTPStatus.BAD_GATEWAY, _error(f"{type(error).__name__}: {error}", 502))
        if answer.status != HTTPStatus.OK:
            return Answer(answer.status, _error(_text_of(raw), answer.status))
        try:
            body = json.loads(raw)
        except ValueError:
            return Answer(HTTPStatus.BAD_GATEWAY, _error(f"no JSON: {_text_of(raw)}", 502))
        return Answer(answer.status, body)

    def _note(self, answer: Answer, call: ProgramCall) -> None:
        status = answer.status
        text = "" if status == HTTPStatus.OK else answer.body["error"]["message"]
        self.traffic.is_full = is_context_overflow(status, text)
        if status == HTTPStatus.OK:
            self.traffic.num_answered += 1
            self.traffic.dialects[call.name] += 1
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


def _goes_on(before: ReplyStart, said: ReplyStart) -> bool:
    """Tell whether a reply is the one that was told; its first spaces may not have been."""
    thoughts = rest_of(said.reasoning, before.reasoning)
    bare = ReplyStart(before.reasoning + (thoughts or ""), said.content.lstrip())
    return said.is_begun_by(before) or (
        said.reasoning.lstrip() == bare.reasoning and bare.is_begun_by(before)
    )


def _changed(*, is_anew: bool) -> Answer:
    """The answer to a call whose reply is not the one that was told."""
    # Only what no reply can bring about is a fault: a failed episode is played again.
    status = HTTPStatus.BAD_GATEWAY if is_anew else HTTPStatus.CONFLICT
    text = "The reply became another than the one whose beginning was sent; ask again."
    return Answer(status, _error(text, status))


def _check_open(request: web.Request) -> None:
    """ConnectionError where the other end has left, also if the loop has not heard of it yet."""
    if request.transport is not None and not request.transport.is_closing():
        ends = select.poll()
        ends.register(request.transport.get_extra_info("socket"), select.POLLRDHUP)
        if not ends.poll(0):
            return
    raise ConnectionError("the program has left")


def _refusal_of(path: str) -> str:
    for end, text in _NOT_SENT.items():
        if path.endswith(end):
            return f"{text} {_REST}"
    return f"There is nothing at {path[:200]}. {_REST}"


def _json(body: dict[str, Any], status: int = HTTPStatus.OK) -> web.Response:
    content = json.dumps(body, separators=(",", ":")).encode()
    return web.Response(body=content, status=status, content_type="application/json")


def _error(text: str, status: int = 400) -> dict[str, Any]:
    """An error as OpenAI's and Anthropic's libraries read it."""
    kind = _ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _text_of(raw: bytes) -> str:
    try:
        payload = json.loads(raw)
        error = payload["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return raw[:500].decode(errors="replace")

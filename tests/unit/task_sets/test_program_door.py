"""What the door between a program and the model lets pass, and what it answers itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import gradus_program.door
from gradus_program.door import _SPEECH, Door, served_context
from gradus_program.speech import Memory, Refused

HELLO = [{"role": "user", "content": "hello"}]
REPLY = {"choices": [{"message": {"role": "assistant", "content": "hi"}}]}


@dataclass
class Upstream:
    """An interception server that answers in order, and remembers what it was asked."""

    answers: list[tuple[int, Any]]
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.read() or b"null"))
        self.headers.append(dict(request.headers))
        status, payload = self.answers.pop(0) if self.answers else (200, REPLY)
        if isinstance(payload, bytes):
            return web.Response(body=payload, content_type="text/event-stream")
        return web.json_response(payload, status=status)


@asynccontextmanager
async def door(
    *answers: tuple[int, Any],
    is_training: bool = True,
    context_tokens: int | None = None,
    **sampling: Any,
) -> AsyncIterator[tuple[Door, Upstream]]:
    upstream = Upstream(list(answers))
    app = web.Application(client_max_size=10**7)
    app.router.add_route("*", "/{path:.*}", upstream.serve)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        async with Door.open(
            url, sampling=sampling, is_training=is_training, context_tokens=context_tokens
        ) as opened:
            yield opened, upstream
    finally:
        await runner.cleanup()


async def post(opened: Door, body: Any, path: str = "/chat/completions") -> tuple[int, bytes]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": "Bearer key", "x-stainless-retry-count": "1"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{opened.url}{path}", data=content, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


async def test_a_chat_completion_passes_with_its_bearer_and_its_retry_count() -> None:
    async with door() as (opened, upstream):
        status, raw = await post(opened, {"messages": HELLO})
    assert (status, json.loads(raw)) == (200, REPLY)
    assert upstream.bodies == [{"messages": HELLO}]
    assert upstream.headers[0]["Authorization"] == "Bearer key"
    assert upstream.headers[0]["x-stainless-retry-count"] == "1"
    assert opened.traffic.num_answered == 1


async def test_a_stream_is_the_reply_as_events_and_the_engine_is_asked_without_one() -> None:
    async with door() as (opened, upstream):
        status, raw = await post(opened, {"messages": HELLO, "stream": True})
    first, end, _ = raw.split(b"\n\n")
    chunk = json.loads(first.removeprefix(b": keepalive\n").removeprefix(b"data: "))
    assert (status, end) == (200, b"data: [DONE]")
    assert chunk["choices"][0]["delta"]["content"] == "hi"
    assert upstream.bodies == [{"messages": HELLO}]
    assert (opened.traffic.num_answered, opened.traffic.num_streams) == (1, 1)


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        ("/chat/completions", {"messages": HELLO}, b": keepalive\n"),
        ("/responses", {"input": "hello"}, b"event: response.created\n"),
        ("/messages", {"messages": HELLO}, b"event: message_start\n"),
    ],
)
async def test_the_first_byte_of_a_stream_comes_before_the_last_token(
    path: str, body: dict[str, Any], first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradus_program.door, "STREAM_SECONDS", 0.0)
    monkeypatch.setattr(gradus_program.door, "PULSE_SECONDS", 0.01)
    is_read = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await is_read.wait()
        return web.json_response(REPLY)

    async with door() as (opened, upstream), asyncio.timeout(60):
        upstream.answer = answer  # type: ignore[method-assign]
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{opened.url}{path}", json={**body, "stream": True}) as stream,
        ):
            assert await stream.content.readline() == first
            is_read.set()
            assert b"hi" in await stream.read()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/embeddings", "Embeddings are not served"),
        ("/responses/compact", "Compaction is not served"),
        ("/completions", "Plain completions are not served"),
        ("/audio/speech", "Only POST /v1/chat/completions, /v1/responses and /v1/messages"),
    ],
)
async def test_what_does_not_train_gets_a_sentence(path: str, text: str) -> None:
    async with door() as (opened, upstream):
        status, raw = await post(opened, {"input": "x"}, path)
    assert status == 400
    assert text in json.loads(raw)["error"]["message"]
    assert len(opened.traffic.refused) == 1
    assert upstream.bodies == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": HELLO, "n": 2}, "n = 2 is not supported: each call is one reply"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "use `tools`"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": ["hello"]}, "has the role 'None'"),
        ({"messages": [{"role": "root", "content": "x"}]}, "has the role 'root'"),
        ({"messages": HELLO, "tools": [{"type": "web_search"}]}, "type `function`"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "cannot be read"),
        ({"messages": [{"role": ["user"]}]}, "has the role"),
        ({"messages": HELLO, "tools": 5}, "type `function`"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "cannot be read"),
        ([], "must be a JSON object"),
        (b"\xff{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
async def test_a_request_that_cannot_be_played_gets_a_sentence(body: Any, text: str) -> None:
    async with door() as (opened, upstream):
        status, raw = await post(opened, body)
    assert (status, upstream.bodies) == (400, [])
    assert text in json.loads(raw)["error"]["message"]


async def test_a_developer_speaks_as_the_system_and_an_empty_n_is_no_n() -> None:
    async with door() as (opened, upstream):
        await post(opened, {"messages": [{"role": "developer", "content": "x"}], "n": None})
    assert upstream.bodies == [{"messages": [{"role": "system", "content": "x"}]}]


async def test_sampling_that_is_not_used_is_counted_by_name() -> None:
    asked = {"messages": HELLO, "temperature": 0.2, "stop": ["\n"], "max_completion_tokens": 64}
    async with door(temperature=1.0, max_tokens=64) as (opened, _):
        await post(opened, asked)
        await post(opened, asked | {"temperature": 1.0, "top_p": 1, "tool_choice": "auto"})
    assert opened.traffic.dropped == {"temperature": 1, "stop": 2}


async def test_what_only_engines_know_is_counted_too() -> None:
    asked = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 9}
    async with door() as (opened, _):
        await post(opened, asked)
    assert opened.traffic.dropped == {"chat_template_kwargs": 1, "min_tokens": 1}


async def test_where_nothing_trains_only_what_the_source_sets_is_dropped() -> None:
    async with door(is_training=False, temperature=1.0) as (opened, _):
        await post(opened, {"messages": HELLO, "temperature": 0.2, "stop": ["\n"]})
    assert opened.traffic.dropped == {"temperature": 1}


async def test_a_program_cannot_set_what_only_the_door_may_set() -> None:
    body = {"messages": HELLO, "gradus_sampling": {"temperature": 0.1}}
    async with door(temperature=1.0) as (opened, upstream):
        await post(opened, body)
        opened.program_decides = True
        await post(opened, {**body, "temperature": 0.5})
    first, second = upstream.bodies
    assert "gradus_sampling" not in first
    assert second["gradus_sampling"] == {"temperature": 0.5}


OTHER = [{"role": "user", "content": "something else"}]


async def test_a_fault_is_forgotten_when_the_same_conversation_succeeds_and_not_by_another() -> (
    None
):
    async with door((503, {"error": {"message": "away"}})) as (opened, _):
        await post(opened, {"messages": HELLO})
        await post(opened, {"messages": OTHER})
        assert list(opened.traffic.faults.values()) == [(503, "away")]
        await post(opened, {"messages": HELLO, "stream": False, "seed": 3})
    assert opened.traffic.faults == {}
    assert opened.traffic.num_answered == 2


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/chat/completions", {"messages": HELLO}, b'data: {"type": "error"'),
        ("/responses", {"input": "hello"}, b"event: response.failed"),
        ("/messages", {"messages": HELLO}, b"event: error"),
    ],
)
async def test_what_fails_once_a_stream_has_begun_is_an_event_and_a_fault(
    path: str, body: dict[str, Any], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradus_program.door, "STREAM_SECONDS", 0.0)
    async with door((502, {"error": {"message": "the engine died"}})) as (opened, _):
        status, raw = await post(opened, {**body, "stream": True}, path)
    assert status == 200
    assert said in raw
    assert b"the engine died" in raw
    assert list(opened.traffic.faults.values()) == [(502, "the engine died")]


async def test_an_early_failure_of_a_stream_keeps_its_status() -> None:
    async with door((503, {"error": {"message": "away"}})) as (opened, _):
        status, raw = await post(opened, {"messages": HELLO, "stream": True}, "/messages")
    error = json.loads(raw)
    assert (status, error["type"], error["error"]["type"]) == (503, "error", "api_error")


async def test_the_key_of_anthropic_s_package_opens_the_door_too() -> None:
    async with door() as (opened, upstream), aiohttp.ClientSession() as http:
        url, headers = f"{opened.url}/messages?beta=true", {"x-api-key": "key"}
        async with http.post(url, json={"messages": HELLO}, headers=headers) as answer:
            assert (await answer.json())["content"] == [{"type": "text", "text": "hi"}]
    assert upstream.headers[0]["Authorization"] == "Bearer key"
    assert "x-api-key" not in upstream.headers[0]


async def test_a_call_that_its_program_leaves_is_cancelled_and_is_no_fault() -> None:
    has_begun, is_cancelled = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        raise AssertionError

    async with door() as (opened, upstream), asyncio.timeout(60):
        upstream.answer = answer  # type: ignore[method-assign]
        asked = asyncio.create_task(post(opened, {"messages": HELLO}))
        begins = asyncio.create_task(has_begun.wait())
        await asyncio.wait({asked, begins}, return_when=asyncio.FIRST_COMPLETED)
        assert not asked.done(), asked.result()
        asked.cancel()
        await is_cancelled.wait()
        assert (opened.traffic.num_unread, opened.traffic.num_answered) == (1, 0)
        assert opened.traffic.faults == {}


async def test_a_program_that_left_is_seen_before_the_loop_hears_of_it() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        gradus_program.door._check_open(request)
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError):
            gradus_program.door._check_open(request)
        seen.append("gone")
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
    finally:
        await runner.cleanup()
    assert seen == ["gone"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_only_turns_that_were_read_are_told(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    gone = [True, False]

    def check(_: object) -> None:
        if gone.pop(0):
            raise ConnectionError

    monkeypatch.setattr(gradus_program.door, "_check_open", check)
    turns = [(200, {**REPLY, "gradus_turn": turn}) for turn in (3, 4)]
    async with door(*turns) as (opened, _):
        opened.traffic.on_read = read.append
        body = {"messages": HELLO, "stream": is_streamed}
        with contextlib.suppress(aiohttp.ClientError):
            await post(opened, body)
        status, raw = await post(opened, body)
        assert (status, b"gradus_turn" in raw) == (200, False)
    assert (read, opened.traffic.num_unread) == ([4], 1)


LONG = {"messages": [{"role": "user", "content": "x" * 100_000}]}


@pytest.mark.shows("F63", "SEC8")
async def test_a_request_beyond_the_context_is_refused_before_it_is_parsed() -> None:
    async with door(context_tokens=1024) as (opened, upstream):
        status, raw = await post(opened, LONG)
        assert opened.traffic.is_full
        await post(opened, {"messages": HELLO})
        assert not opened.traffic.is_full
    assert (status, len(upstream.bodies)) == (400, 1)
    assert "maximum context length of 1024 tokens" in json.loads(raw)["error"]["message"]


@pytest.mark.parametrize("context_tokens", [8192, None])
async def test_the_same_request_passes_with_a_context_that_may_hold_it(
    context_tokens: int | None,
) -> None:
    async with door(context_tokens=context_tokens) as (opened, upstream):
        assert (await post(opened, LONG))[0] == 200
    assert upstream.bodies == [LONG]


MANY: list[Any] = [{"type": "text", "text": "x"}] * 5000


@pytest.mark.shows("SEC8")
@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO * 5000},
        {"messages": [{"role": "user", "content": MANY}]},
        {"messages": [{"role": "assistant", "tool_calls": MANY}]},
        {"messages": [{"role": "assistant", "reasoning_details": MANY}]},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}] * 600},
    ],
)
async def test_what_is_too_many_for_the_loop_is_refused_by_number(body: Any) -> None:
    async with door() as (opened, upstream):
        status, raw = await post(opened, body)
    assert (status, upstream.bodies) == (400, [])
    assert "at once" in json.loads(raw)["error"]["message"]


async def test_of_many_refusals_a_few_are_kept_and_all_are_counted() -> None:
    async with door() as (opened, _):
        for number in range(20):
            await post(opened, {}, f"/{number}")
    assert opened.traffic.num_refused == 20
    assert [text.split()[4] for text in opened.traffic.refused] == [
        *("/v1/0.", "/v1/1.", "/v1/2.", "/v1/3.", "/v1/19.")
    ]


@pytest.mark.shows("SEC8")
async def test_a_program_that_asks_in_a_loop_is_slowed_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradus_program.door, "CALLS_PER_SECOND", 100.0)
    monkeypatch.setattr(gradus_program.door, "BURST_SECONDS", 0.05)
    started = time.monotonic()
    async with door() as (opened, _):
        for _ in range(20):
            await post(opened, {}, "/")
    assert time.monotonic() - started > 0.14


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


async def test_an_image_passes_only_where_nothing_trains() -> None:
    async with door() as (opened, upstream):
        status, raw = await post(opened, {"messages": IMAGE})
        assert (status, upstream.bodies) == (400, [])
        assert "reads text" in json.loads(raw)["error"]["message"]
    async with door(is_training=False) as (opened, _):
        assert (await post(opened, {"messages": IMAGE}))[0] == 200


async def test_a_refusal_of_the_rollout_is_no_fault_of_the_engine() -> None:
    async with door((400, {"error": {"message": "rollout stopped: max_turns"}})) as (opened, _):
        await post(opened, {"messages": HELLO})
    assert opened.traffic.faults == {}
    assert opened.traffic.refused == ["rollout stopped: max_turns"]


async def test_an_interception_server_that_is_gone_is_a_fault_of_the_engine() -> None:
    async with Door.open("http://127.0.0.1:1/v1", sampling={}, is_training=True) as opened:
        status, _ = await post(opened, {"messages": HELLO})
    assert status == 502
    assert len(opened.traffic.faults) == 1


async def test_the_context_is_what_the_list_of_models_says() -> None:
    cards = {"data": [{"id": "policy", "max_model_len": 512}, {"id": "other"}]}
    async with door((200, cards), (200, cards), (502, {"error": "away"})) as (opened, _):
        found = [await served_context(opened.upstream, "key", it) for it in ("policy", "other")]
        assert found == [512, None]
        with pytest.raises(aiohttp.ClientError):
            await served_context(opened.upstream, "key", "policy")


async def test_four_calls_at_once_are_four_calls() -> None:
    async with door() as (opened, upstream):
        answers = await asyncio.gather(*(post(opened, {"messages": HELLO}) for _ in range(4)))
    assert [status for status, _ in answers] == [200] * 4
    assert len(upstream.bodies) == opened.traffic.num_answered == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={"content": JSON, "tool_calls": JSON, "tool_call_id": JSON, "name": JSON},
    )
    | JSON,
    max_size=3,
)


@pytest.mark.shows("SEC39", "SEC40")
@given(
    body=st.fixed_dictionaries(
        {"messages": MESSAGES | st.just(HELLO)},
        optional={
            "n": st.just(1),
            "tools": st.lists(
                st.fixed_dictionaries(
                    {}, optional={"type": st.just("function") | JSON, "function": JSON}
                ),
                max_size=2,
            )
            | JSON,
        },
    )
    | JSON
)
def test_no_body_makes_a_reader_stumble(body: Any) -> None:
    for kind in _SPEECH.values():
        with contextlib.suppress(Refused):
            kind.read_safely(body, Memory()).check(text_only=True)

"""The tools of an episode: calls at once or in order, and an answer to whatever is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from verifiers.v1.errors import ToolsetError

from gradus.environments.verifiers.tool_servers import ToolUrls
from gradus_chat import tool_client
from gradus_chat.model_calls import Connections
from gradus_chat.tool_client import text_of
from gradus_chat.tools import EpisodeTools, ToolCall, ToolLimits

Handler = Callable[[dict[str, Any]], Awaitable[Any]]
LIMITS = ToolLimits(call_seconds=5.0, max_calls=4, max_characters=1000)


def text(content: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": content}]}


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A tool server of one tool, `open`, which answers with what `handler` returns."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["method"] == "tools/list":
            tools = [{"name": "open", "description": "Open.", "inputSchema": {"type": "object"}}]
            return web.json_response({"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}})
        result = await handler(body["params"]["arguments"])
        if isinstance(result, web.StreamResponse):
            return result
        return web.json_response({"jsonrpc": "2.0", "id": 1, "result": result})

    app = web.Application()
    app.router.add_post("/mcp", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def tools_of(
    handler: Handler, *, limits: ToolLimits = LIMITS, is_stateless: bool = True
) -> AsyncIterator[EpisodeTools]:
    async with serving(handler) as url, Connections().lease() as http, AsyncExitStack() as stack:
        urls = ToolUrls({"box": url}, stateless={"box"} if is_stateless else ())
        yield await EpisodeTools.connect(urls, http, stack, limits)


def calls(*arguments: str, name: str = "box_open") -> list[ToolCall]:
    return [ToolCall(str(place), name, text) for place, text in enumerate(arguments)]


async def contents(tools: EpisodeTools, made: list[ToolCall]) -> list[str]:
    answers = await tools.answer(made, {})
    assert [answer["tool_call_id"] for answer in answers] == [call.id for call in made]
    return [answer["content"] for answer in answers]


async def test_the_tools_are_declared_under_the_name_of_their_server() -> None:
    async with tools_of(never) as tools:
        assert tools.schemas == [
            {
                "type": "function",
                "function": {
                    "name": "box_open",
                    "description": "Open.",
                    "parameters": {"type": "object"},
                },
            }
        ]


async def never(arguments: dict[str, Any]) -> Any:
    raise AssertionError(f"called with {arguments}")


async def test_calls_to_a_server_without_state_are_made_at_once_and_answered_in_order() -> None:
    all_there = asyncio.Barrier(3)

    async def wait_for_the_others(arguments: dict[str, Any]) -> Any:
        await all_there.wait()
        return text(f"box {arguments['n']}")

    async with tools_of(wait_for_the_others) as tools, asyncio.timeout(60):
        made = calls('{"n": 2}', '{"n": 0}', '{"n": 1}')
        assert await contents(tools, made) == ["box 2", "box 0", "box 1"]


async def test_calls_to_a_server_of_the_episode_are_made_one_after_another() -> None:
    running = 0
    order = []

    async def alone(arguments: dict[str, Any]) -> Any:
        nonlocal running
        running += 1
        assert running == 1
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        order.append(arguments["n"])
        return text("")

    async with tools_of(alone, is_stateless=False) as tools:
        await contents(tools, calls('{"n": 2}', '{"n": 0}', '{"n": 1}'))
    assert order == [2, 0, 1]


async def test_a_deadline_is_told_to_the_model_and_ends_the_call() -> None:
    ended = asyncio.Event()

    async def hang(arguments: dict[str, Any]) -> Any:
        if arguments:
            return text("quick")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    limits = ToolLimits(call_seconds=0.05, max_calls=4, max_characters=1000)
    async with tools_of(hang, limits=limits) as tools, asyncio.timeout(60):
        answers = await contents(tools, calls("{}", '{"a": 1}'))
        await ended.wait()
    assert answers == [
        "error: the tool gave no answer within 0.05 s, and was given up",
        "quick",
    ]


async def test_a_cancelled_turn_leaves_no_call_and_no_task() -> None:
    started, ended = asyncio.Barrier(3), asyncio.Barrier(3)

    async def hang(_: dict[str, Any]) -> Any:
        await started.wait()
        try:
            await asyncio.Event().wait()
        finally:
            await ended.wait()

    async with tools_of(hang) as tools, asyncio.timeout(60):
        before = asyncio.all_tasks()
        turn = asyncio.create_task(tools.answer(calls("{}", "{}"), {}))
        await started.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert {t for t in asyncio.all_tasks() - before if "answer" in repr(t.get_coro())} == set()
        await ended.wait()


@pytest.mark.parametrize("arguments", ['{"a": ', "[]", "42", '"text"', "null", "[" * 100_000])
async def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    async with tools_of(never) as tools:
        (answer,) = await contents(tools, calls(arguments))
    assert "must be a JSON object, not" in answer
    assert len(answer) < 400


async def test_an_unknown_tool_is_told_and_a_long_name_is_cut() -> None:
    async with tools_of(never) as tools:
        (answer,) = await contents(tools, calls("{}", name="x" * 5000))
    assert answer.startswith("error: unknown tool 'xxx")
    assert len(answer) < 300


async def test_calls_beyond_the_limit_of_a_turn_are_not_made() -> None:
    made = 0

    async def count(_: dict[str, Any]) -> Any:
        nonlocal made
        made += 1
        return text("done")

    async with tools_of(count) as tools:
        answers = await contents(tools, calls(*["{}"] * 6))
    assert (made, answers[:4]) == (4, ["done"] * 4)
    assert answers[4] == answers[5]
    assert answers[5].startswith("error: not run, a turn may make 4 calls at most")


async def test_a_long_answer_loses_its_middle_and_says_so() -> None:
    async def long(_: dict[str, Any]) -> Any:
        return text("a" * 60_000 + "z" * 40_000)

    async with tools_of(long) as tools:
        (answer,) = await contents(tools, calls("{}"))
    assert answer.count("a" * 500) == answer.count("z" * 500) == 1
    assert "\n[99000 of 100000 characters are left out here]\n" in answer
    assert len(answer) < 1100


async def test_an_answer_without_an_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_client, "MAX_ANSWER_BYTES", 10_000)

    async def endless(_: dict[str, Any]) -> Any:
        return web.Response(body=b'{"result": "' + b"x" * 10**6, content_type="application/json")

    async with tools_of(endless) as tools:
        assert await contents(tools, calls("{}")) == [
            "error: the tool's answer is longer than 10000 bytes"
        ]


@pytest.mark.parametrize("body", [b"\xff\xfe\x00", b"", b"<html>", b"[1]", b"[" * 100_000])
async def test_an_answer_that_is_no_json_object_is_told(body: bytes) -> None:
    async def broken(_: dict[str, Any]) -> Any:
        return web.Response(body=body, content_type="application/json")

    async with tools_of(broken) as tools:
        (answer,) = await contents(tools, calls("{}"))
    assert answer.startswith("error: the tool server answered")


async def test_an_answer_as_a_stream_of_events_is_read() -> None:
    async def stream(_: dict[str, Any]) -> Any:
        last = json.dumps({"jsonrpc": "2.0", "id": 1, "result": text("found")})
        events = f'event: message\ndata: {{"method": "progress"}}\n\ndata: {last}\n\n'
        return web.Response(text=events, content_type="text/event-stream")

    async with tools_of(stream) as tools:
        assert await contents(tools, calls("{}")) == ["found"]


async def test_what_is_no_text_is_named_and_left_out() -> None:
    async def picture(_: dict[str, Any]) -> Any:
        image = {"type": "image", "data": "A" * 400, "mimeType": "image/png"}
        blob = {"type": "resource", "resource": {"blob": "A" * 40, "mimeType": "a/b"}}
        page = {"type": "resource", "resource": {"text": "a page"}}
        return {"content": [image, blob, page]}

    async with tools_of(picture) as tools:
        (answer,) = await contents(tools, calls("{}"))
    assert answer == (
        "[image/png of about 300 bytes is left out: only text is read here]\n"
        "[a/b of about 30 bytes is left out: only text is read here]\n"
        "a page"
    )


async def test_a_server_that_dies_fails_the_episode_at_once_under_its_name() -> None:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(Connections().lease())
        async with serving(never) as url:
            tools = await EpisodeTools.connect({"box": f"{url}?s=secret"}, http, stack, LIMITS)
        async with asyncio.timeout(60):
            with pytest.raises(ToolsetError, match="tool server 'box' is gone: ") as caught:
                await tools.answer(calls("{}"), {})
    assert "secret" not in str(caught.value)


async def test_a_server_that_breaks_off_fails_the_turn_and_ends_its_other_calls() -> None:
    both, ended = asyncio.Barrier(2), asyncio.Event()

    async def break_off(arguments: dict[str, Any]) -> Any:
        await both.wait()
        if arguments:
            raise ConnectionResetError
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def answer(request: dict[str, Any]) -> Any:
        try:
            return await break_off(request)
        except ConnectionResetError:
            half = web.Response(body=b"{", headers={"Content-Length": "99"})
            half.force_close()
            return half

    async with tools_of(answer) as tools, asyncio.timeout(60):
        with pytest.raises(ToolsetError, match="is gone"):
            await tools.answer(calls("{}", '{"a": 1}'), {})
        await ended.wait()


async def test_disabled_tools_are_neither_offered_nor_run() -> None:
    async with serving(never) as url, Connections().lease() as http, AsyncExitStack() as stack:
        tools = await EpisodeTools.connect({"box": url}, http, stack, LIMITS, disabled=["box_open"])
        assert tools.schemas == []
        (answer,) = await contents(tools, calls("{}"))
    assert answer == "error: unknown tool 'box_open'"


async def test_a_decided_message_stands_in_place_of_its_call() -> None:
    denied = {"role": "tool", "tool_call_id": "0", "content": "x" * 5000}

    async def done(_: dict[str, Any]) -> Any:
        return text("done")

    async with tools_of(done) as tools:
        first, second = await tools.answer(calls("{}", "{}"), {0: denied})
    assert first["content"].startswith("x" * 500)
    assert len(first["content"]) < 1100
    assert second["content"] == "done"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
BLOCKS = st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "text", "data", "resource"), JSON))
    | JSON
)


@given(blocks=BLOCKS | JSON)
def test_any_content_becomes_text_that_can_be_encoded(blocks: Any) -> None:
    text_of(blocks).encode()


def test_a_lone_surrogate_is_replaced_and_a_pair_becomes_its_character() -> None:
    blocks = [{"type": "text", "text": "a\ud800b \ud83d\ude00"}]
    assert text_of(blocks) == "a\ufffdb \U0001f600"


@asynccontextmanager
async def serving_sessions() -> AsyncIterator[tuple[str, list[str]]]:
    """A tool server that knows only the form of the protocol that begins with a handshake."""
    asked: list[str] = []
    results: dict[str, Any] = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "old", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "open", "inputSchema": {"type": "object"}}]},
        "tools/call": text("an old key"),
    }

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        method = body["method"]
        if request.headers.get("mcp-protocol-version") == tool_client.PROTOCOL:
            error = {"code": -32600, "message": "unknown version"}
            return web.json_response(
                {"jsonrpc": "2.0", "id": body["id"], "error": error}, status=400
            )
        asked.append(method)
        if "id" not in body:
            return web.Response(status=202)
        reply = {"jsonrpc": "2.0", "id": body["id"], "result": results[method]}
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/mcp", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", asked
    finally:
        await runner.cleanup()


async def test_a_server_of_an_older_form_is_asked_by_the_sdk_and_no_call_is_repeated() -> None:
    async with (
        serving_sessions() as (url, asked),
        Connections().lease() as http,
        AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        tools = await EpisodeTools.connect({"box": url}, http, stack, LIMITS)
        assert [schema["function"]["name"] for schema in tools.schemas] == ["box_open"]
        assert await contents(tools, calls("{}")) == ["an old key"]
    assert asked.count("initialize") == asked.count("tools/call") == 1

"""The chat loop: what it sends to the endpoint, and how it takes each answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE
from verifiers.v1.utils.loaders import harness_class

from gradus.errors import EnvironmentFailure
from gradus.wire.episode import CONTEXT_FULL
from gradus_chat.chat import ChatHarness, ChatHarnessConfig, ChatSession
from gradus_chat.model_calls import MAX_RETRY_DELAY_SECONDS, RetryPolicy

Answer = tuple[int, Any]


def says(text: str | None, *calls: dict[str, Any]) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def refuses(status: int, message: str) -> Answer:
    return status, {"error": {"message": message}}


def calling(name: str, arguments: str, *, id: str = "call_0") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class FakeTrace:
    """A trace of which the loop reads and sets the stop condition, and why it is full."""

    id: str = "trace"
    stop_condition: str | None = None
    info: dict[str, str] = field(default_factory=dict)

    def stop(self, condition: str) -> None:
        self.stop_condition = condition


@dataclass
class FakeEndpoint:
    """An interception server that gives scripted answers and records what it was asked."""

    answers: list[Answer]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    on_call: Callable[[], None] = lambda: None

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.on_call()
        status, payload = self.answers.pop(0)
        if isinstance(payload, bytes):
            return web.Response(status=status, body=payload)
        return web.json_response(payload, status=status)


@asynccontextmanager
async def endpoint(*answers: Answer) -> AsyncIterator[FakeEndpoint]:
    fake = FakeEndpoint(list(answers))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    app.router.add_post("/tool", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


@asynccontextmanager
async def session(
    url: str, *, trace: FakeTrace | None = None, gate: str | None = None, **task: Any
) -> AsyncIterator[ChatSession]:
    harness = ChatHarness(ChatHarnessConfig(retry_delay_seconds=0.001))
    opened = await harness.session(
        SimpleNamespace(model="policy"),
        trace or FakeTrace(),
        None,
        f"{url}/v1",
        "the-secret",
        {},
        vf.TaskData(**{"prompt": "hello", **task}),
        tool_interception_url=gate,
    )
    try:
        yield opened
    finally:
        await opened.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_verifiers_finds_the_harness_by_its_id() -> None:
    assert harness_class("gradus-chat") is ChatHarness
    assert ChatHarnessConfig().id == "gradus-chat"


async def test_a_reply_without_tool_calls_ends_the_segment() -> None:
    async with endpoint(says("hi")) as fake, session(fake.url) as chat:
        assert (await chat.play(None)).exit_code == 0
    assert fake.bodies == [{"model": "policy", "messages": [user("hello")]}]
    assert fake.headers[0]["Authorization"] == "Bearer the-secret"


async def test_the_system_prompt_stands_before_the_prompt() -> None:
    async with endpoint(says("hi")) as fake, session(fake.url, system_prompt="be kind") as chat:
        await chat.play(None)
    assert fake.bodies[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        user("hello"),
    ]


async def test_a_prompt_of_messages_is_sent_as_it_is() -> None:
    prompt = [vf.UserMessage(content="a"), vf.AssistantMessage(content="b")]
    async with endpoint(says("c")) as fake, session(fake.url, prompt=prompt) as chat:
        await chat.play(None)
    assert fake.bodies[0]["messages"] == [user("a"), assistant("b")]


async def test_a_later_segment_continues_the_conversation() -> None:
    async with endpoint(says("one"), says("two")) as fake, session(fake.url) as chat:
        await chat.turn()
        await chat.turn([vf.UserMessage(content="and then?")])
    assert fake.bodies[1]["messages"] == [user("hello"), assistant("one"), user("and then?")]


async def test_a_user_who_opens_is_the_first_message() -> None:
    async with endpoint(says("one")) as fake, session(fake.url, prompt=None) as chat:
        await chat.turn([vf.UserMessage(content="I open")])
    assert fake.bodies[0]["messages"] == [user("I open")]


async def test_an_error_that_may_pass_is_tried_again_as_the_same_call() -> None:
    answers = (refuses(503, "busy"), refuses(429, "slow down"), says("hi"))
    async with endpoint(*answers) as fake, session(fake.url) as chat:
        assert (await chat.play(None)).exit_code == 0
    assert fake.bodies[0] == fake.bodies[1] == fake.bodies[2]
    counts = [headers.get("x-stainless-retry-count") for headers in fake.headers]
    assert counts == [None, "1", "2"]


async def test_an_error_that_stays_fails_the_segment_with_its_text() -> None:
    answers = (refuses(500, "out of order"),) * 3
    async with endpoint(*answers) as fake, session(fake.url) as chat:
        with pytest.raises(EnvironmentFailure, match="500: out of order"):
            await chat.play(None)
    assert fake.answers == []


async def test_a_wrong_request_is_not_tried_again() -> None:
    async with endpoint(refuses(422, "bad tool"), says("never")) as fake, session(fake.url) as chat:
        with pytest.raises(EnvironmentFailure, match="422: bad tool"):
            await chat.play(None)
    assert len(fake.bodies) == 1


async def test_an_answer_that_is_not_json_is_reported_as_text() -> None:
    async with endpoint((404, b"<html>lost</html>")) as fake, session(fake.url) as chat:
        with pytest.raises(EnvironmentFailure, match="404: <html>lost"):
            await chat.play(None)


async def test_a_stopped_rollout_ends_the_segment_without_an_error() -> None:
    trace = FakeTrace()
    async with endpoint(refuses(400, "stopped: max_turns")) as fake:
        fake.on_call = lambda: trace.stop("max_turns")
        async with session(fake.url, trace=trace) as chat:
            assert (await chat.play(None)).exit_code == 0


async def test_a_prompt_longer_than_the_context_stops_the_trace() -> None:
    trace = FakeTrace()
    overflow = refuses(400, "Prompt length (9) exceeds maximum context length (8).")
    async with endpoint(overflow) as fake, session(fake.url, trace=trace) as chat:
        assert (await chat.play(None)).exit_code == 0
    assert trace.stop_condition == CONTEXT_FULL
    assert "Prompt length (9) exceeds maximum context length (8)." in trace.info[CONTEXT_FULL]


async def test_an_endpoint_out_of_reach_is_a_transport_error() -> None:
    async with endpoint() as fake:
        url = fake.url
    async with session(url) as chat:
        result = await chat.play(None)
    assert result.exit_code == MODEL_TRANSPORT_ERROR_EXIT_CODE
    assert "Cannot connect" in result.stderr


async def test_what_the_model_got_wrong_about_tools_is_told_to_the_model() -> None:
    wrong = says(None, calling("nothing", "{}"))
    async with endpoint(wrong, says("sorry")) as fake, session(fake.url) as chat:
        await chat.play(None)
    told = fake.bodies[1]["messages"][-1]
    assert told == {
        "role": "tool",
        "tool_call_id": "call_0",
        "name": "nothing",
        "content": "error: unknown tool 'nothing'",
    }


async def test_the_gate_can_deny_a_call_and_put_its_own_result() -> None:
    denial = {"role": "tool", "tool_call_id": "call_0", "content": "not allowed"}
    answers = (
        says(None, calling("remove", '{"all": true}')),
        (200, {"action": "deny", "message": denial}),
        says("as you wish"),
    )
    async with endpoint(*answers) as fake, session(fake.url, gate=f"{fake.url}/tool") as chat:
        await chat.play(None)
    assert fake.bodies[1] == {
        "tool_call_id": "call_0",
        "name": "remove",
        "arguments": {"all": True},
    }
    assert fake.bodies[2]["messages"][-1] == denial


async def test_the_gate_can_stop_the_rollout() -> None:
    answers = (says(None, calling("a", "{}")), (200, {"action": "stop", "reason": "over"}))
    async with endpoint(*answers) as fake, session(fake.url, gate=f"{fake.url}/tool") as chat:
        with pytest.raises(EnvironmentFailure, match="'a' was stopped: over"):
            await chat.play(None)


async def test_launch_plays_one_segment_and_lets_go_of_the_connections() -> None:
    harness = ChatHarness(ChatHarnessConfig())
    async with endpoint(says("hi")) as fake:
        context = SimpleNamespace(model="policy")
        data = vf.TaskData(prompt="hello")
        result = await harness.launch(
            context, FakeTrace(), None, f"{fake.url}/v1", "secret", {}, data
        )
    assert result.exit_code == 0
    async with harness.connections.lease() as first, harness.connections.lease() as second:
        assert first is second
    assert first.closed


def test_the_delay_doubles_and_has_an_end() -> None:
    policy = RetryPolicy(max_retries=9, first_delay_seconds=0.5)
    for retry in range(9):
        longest = min(MAX_RETRY_DELAY_SECONDS, 0.5 * 2**retry)
        assert longest / 2 <= policy.delay_seconds(retry) <= longest

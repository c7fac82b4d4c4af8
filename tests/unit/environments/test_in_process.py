"""Calls without HTTP: the same record, field by field, whatever goes right or wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import verifiers.v1 as vf
from policy_talks import CALL, TOKEN, UserOpens, open_add_server
from renderers import Qwen3RendererConfig
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients import train
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession

from gradus.environments.verifiers import in_process, replies, shortcuts
from gradus.environments.verifiers.engine_client import RequestSeeds
from gradus.environments.verifiers.in_process import LocalServer, local_server
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import AnyBody, Drip, Fault, Reply, Reset, Status, Stuck, Truncate
from gradus.testing.tiny_model import build_tiny_tokenizer
from gradus_chat import tools

pytestmark = pytest.mark.torch

WITH_HTTP = InterceptionServer.start


@dataclass(frozen=True)
class Case:
    """A conversation, and what goes wrong in it."""

    name: str
    replies: tuple[str, ...] = ("fine",)
    users: tuple[str, ...] = ("hello",)
    faults: tuple[Fault, ...] = ()
    seat: dict[str, Any] = field(default_factory=dict)
    max_length_tokens: int = 2048
    held_after: int | None = None
    """From this call on the engine does not answer."""
    task: str = "calculating"


CASES = (
    Case("one turn"),
    Case("three turns of a user", replies=("a", "b", "c"), users=("x", "y", "z")),
    Case("a tool twice", replies=(CALL, f"again {CALL}", "3")),
    Case("two tools in one turn", replies=(f"{CALL}\n{CALL}", "3")),
    Case("a turn limit", replies=(CALL, CALL, CALL, CALL), seat={"max_turns": 2}),
    Case("a token limit", replies=(CALL, CALL, CALL), seat={"max_total_tokens": 60}),
    Case("an error that passes", faults=(Status(500),)),
    Case("a busy engine", faults=(Status(429), Status(429))),
    Case("an engine that stays broken", faults=(Status(500),) * 9),
    Case("a request that is wrong", faults=(Status(400),)),
    Case("a broken connection", faults=(Reset(), Reset())),
    Case("half an answer", faults=(Truncate(),)),
    Case("an answer that is no JSON", faults=(AnyBody(b"<html>"),) * 9),
    Case("an answer without logprobs", faults=(AnyBody(b'{"choices": [{"token_ids": [5]}]}'),) * 9),
    Case("no answer", faults=(Stuck(),) * 9, seat={"timeout": {"rollout": 0.2}}),
    Case("no answer after a turn", (CALL, "b"), held_after=1, seat={"timeout": {"rollout": 0.5}}),
    Case("a prompt that is too long", users=("long " * 50,), max_length_tokens=20),
    Case("too long in the second turn", replies=(CALL * 3, "b"), max_length_tokens=120),
    Case("a stop of the task", replies=(CALL, CALL, CALL), task="stopping"),
)


class Calculating(UserOpens):
    """Pays for a long reply."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Stopping(Calculating):
    """Stops after two turns, denies each call with an own text, and so uses the gate."""

    @vf.stop  # type: ignore[untyped-decorator]
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 2

    @vf.intercept  # type: ignore[untyped-decorator]
    async def denied(self, request: vf.Request) -> vf.Request:
        last = request.messages[-1]
        if isinstance(last, vf.ToolMessage):
            last.content = "denied"
        return request


@dataclass(frozen=True)
class Model:
    """A tokenizer on disk and in memory."""

    path: Path
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("model")
    return Model(directory, build_tiny_tokenizer(directory))


@pytest.fixture(autouse=True)
def _as_in_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(InterceptionServer, "start", WITH_HTTP)
    monkeypatch.setattr(train, "build_async_openai", train.build_async_openai)
    replies.use_engine_client(RequestSeeds())
    monkeypatch.setattr(tools, "open_server", open_add_server)
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    monkeypatch.setenv("GRADUS_INFERENCE_TOKEN", TOKEN)
    yield
    assert in_process._running == {}


@asynccontextmanager
async def scripted(case: Case, model: Model) -> AsyncIterator[tuple[ScriptedEngine, vf.Agent]]:
    """An engine that replies as the case says, and an agent that asks it."""
    texts = iter(case.replies)
    asked = itertools.count(1)

    def reply(_: list[int]) -> Reply:
        if next(asked) == case.held_after:
            engine.hold()
        return Reply(model.tokenizer.encode(next(texts), add_special_tokens=False))

    async with ScriptedEngine(
        reply=reply, data_token=TOKEN, max_length_tokens=case.max_length_tokens
    ) as engine:
        for fault in case.faults:
            engine.inject(fault)
        replies.use_engine_client(RequestSeeds())
        config = vf.AgentConfig(
            harness={"id": "gradus-chat", "retry_delay_seconds": 0.001},
            runtime={"type": "subprocess"},
            model="policy",
            client=vf.TrainClientConfig(
                base_url=engine.base_url,
                api_key_var="GRADUS_INFERENCE_TOKEN",
                renderer=Qwen3RendererConfig(),
                renderer_model_name=str(model.path),
            ),
            sampling={"temperature": 1.0, "max_tokens": 200, "seed": 7},
            **case.seat,
        )
        yield engine, vf.make_agent(config)


async def play(case: Case, model: Model) -> tuple[vf.Trace, ScriptedEngine]:
    """The trace of one conversation, and the engine that replied."""
    task = {"calculating": Calculating, "stopping": Stopping}[case.task](vf.TaskData())
    async with (
        scripted(case, model) as (engine, agent),
        agent,
        agent.interaction(task) as talk,
    ):
        for text in case.users:
            if (await talk.turn(text)).terminated:
                break
    return talk.trace, engine


def scrubbed(value: Any, trace_id: str, key: str = "") -> Any:
    """A record without what differs between any two plays: times, ids, ports, stack frames."""
    if isinstance(value, dict):
        return {name: scrubbed(part, trace_id, name) for name, part in value.items()}
    if isinstance(value, list):
        return [scrubbed(part, trace_id, key) for part in value]
    if isinstance(value, float) and key in ("start", "end", "timestamp", "duration"):
        return value > 0
    if isinstance(value, str):
        text = value.strip().splitlines()[-1] if key == "traceback" and value else value
        return re.sub(r"127\.0\.0\.1:\d+", "HOST", text.replace(trace_id, "TRACE"))
    return value


def record(trace: vf.Trace, engine: ScriptedEngine) -> dict[str, Any]:
    """All that verifiers recorded, and all that the engine was asked."""
    calls = [(call.prompt_token_ids, call.sampling_params, call.status) for call in engine.calls]
    dumped: dict[str, Any] = scrubbed(trace.model_dump(mode="python"), trace.id)
    return {**dumped, "asked": calls}


def in_this_process() -> None:
    """From here on harnesses call the interception servers of this process."""
    shortcuts.serve_in_process()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_record_is_the_same_field_by_field(
    case: Case, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts: list[str] = []
    post = LocalServer.post

    async def counted(server: LocalServer, url: str, *rest: Any) -> tuple[int, bytes]:
        posts.append(url)
        return await post(server, url, *rest)

    monkeypatch.setattr(LocalServer, "post", counted)
    over_http = record(*await play(case, model))
    assert posts == []
    in_this_process()
    here = record(*await play(case, model))
    assert posts
    assert over_http.keys() == here.keys()
    for name, value in over_http.items():
        assert here[name] == value, name


BROKEN = {
    "an error": Status(500),
    "a reset": Reset(),
    "half an answer": Truncate(),
    "a page": AnyBody(b"<html>busy</html>", "text/html"),
    "nothing": AnyBody(b""),
    "another object": AnyBody(b"{}"),
    "another type": AnyBody(b'{"choices": [{"token_ids": "five"}]}'),
}


@pytest.mark.shows("F62")
@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
async def test_f62_a_broken_answer_costs_a_call_and_many_the_episode(
    fault: Fault, model: Model
) -> None:
    trace, engine = await play(Case("once", faults=(fault,)), model)
    assert (trace.errors, len(engine.calls)) == ([], 2)
    trace, engine = await play(Case("always", faults=(fault,) * 9), model)
    if isinstance(fault, Reset | Truncate):
        # The server may have ended, and another one take its place: it is asked again.
        assert (trace.errors, len(engine.calls)) == ([], 10)
        return
    (error,) = trace.errors
    assert error.type in ("ProviderError", "HarnessError")
    assert (trace.num_turns, trace.rewards) == (0, {})


@pytest.mark.shows("F64")
async def test_f64_an_answer_byte_by_byte_ends_at_the_deadline_of_the_rollout(model: Model) -> None:
    began = time.monotonic()
    drips = (Drip(b"x" * 1000, interval_seconds=0.05),)
    trace, _ = await play(Case("drip", faults=drips, seat={"timeout": {"rollout": 0.4}}), model)
    assert time.monotonic() - began < 30
    assert (trace.stop_condition, trace.is_timeout) == ("agent_timeout", True)


@asynccontextmanager
async def serving(
    case: Case, model: Model
) -> AsyncIterator[tuple[ScriptedEngine, LocalServer, str, RolloutSession]]:
    """An engine, an interception server of this process, and a rollout that is registered there."""
    in_this_process()
    async with scripted(case, model) as (engine, agent), InterceptionServer() as server:
        task = Calculating(vf.TaskData())
        trace = vf.Trace(
            task={"type": "Calculating", "data": task.data},
            state=vf.State(),
            agent={"config": agent.config},
        )
        session = RolloutSession(ctx=agent.ctx, trace=trace)
        async with server.acquire(session) as (url, secret, _):
            local = local_server(f"{url}/v1")
            assert local is not None
            yield engine, local, secret, session


def asks(local: LocalServer, secret: str, text: str = "hi", **headers: str) -> Any:
    """One model call."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]})
    return local.post(
        f"{local.base_url}/v1/chat/completions",
        body.encode(),
        {
            "authorization": f"Bearer {secret}",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        },
    )


async def test_a_wrong_secret_is_refused_as_over_http(model: Model) -> None:
    async with serving(Case("secret"), model) as (engine, local, _, session):
        for path in ("/v1/chat/completions", "/tool"):
            url = f"{local.base_url}{path}"
            async with aiohttp.ClientSession() as http, http.post(url, data=b"{}") as response:
                over_http = response.status, await response.read()
            assert await local.post(url, b"{}", {}) == over_http
            assert over_http[0] == 401
        assert (engine.calls, session.trace.nodes) == ([], [])


async def test_a_route_that_the_server_lacks_is_not_found(model: Model) -> None:
    async with serving(Case("route"), model) as (_, local, secret, _):
        headers = {"Authorization": f"Bearer {secret}"}
        status, _ = await local.post(f"{local.base_url}/state", b"{}", headers)
        assert status == 404


async def test_a_body_that_is_no_json_is_a_server_error_as_over_http(model: Model) -> None:
    async with serving(Case("body"), model) as (_, local, secret, _):
        headers = {"Authorization": f"Bearer {secret}"}
        url = f"{local.base_url}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=b"<html>", headers=headers) as response,
        ):
            assert response.status == 500
        assert (await local.post(url, b"<html>", headers))[0] == 500


async def test_two_calls_at_once_are_two_turns(model: Model) -> None:
    async with serving(Case("two", replies=("a", "b")), model) as (engine, local, secret, session):
        first, second = await asyncio.gather(asks(local, secret, "one"), asks(local, secret, "two"))
        assert first[0] == second[0] == 200
        assert len(engine.calls) == session.trace.num_turns == session.trace.num_branches == 2


async def test_a_retry_beside_its_call_gets_the_same_answer_and_one_turn(model: Model) -> None:
    async with serving(Case("beside"), model) as (engine, local, secret, session):
        engine.hold()
        call = asyncio.create_task(asks(local, secret, idempotency_key="k"))
        await engine.wait_until(lambda engine: engine.running == 1)
        retry = asyncio.create_task(asks(local, secret, idempotency_key="k"))
        await asyncio.sleep(0)
        engine.release()
        assert await call == await retry
        assert await asks(local, secret, idempotency_key="k") == await call
        assert len(engine.calls) == session.trace.num_turns == 1


async def test_a_call_outlives_its_caller_and_its_retry_takes_the_answer(model: Model) -> None:
    async with serving(Case("outlives"), model) as (engine, local, secret, session):
        engine.hold()
        call = asyncio.create_task(asks(local, secret))
        await engine.wait_until(lambda engine: engine.running == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.running == 1
        retry = asyncio.create_task(asks(local, secret, x_stainless_retry_count="1"))
        engine.release()
        assert (await retry)[0] == 200
        assert len(engine.calls) == session.trace.num_turns == 1


async def test_the_end_of_the_rollout_ends_the_call_and_not_its_caller(model: Model) -> None:
    async with serving(Case("end"), model) as (engine, local, secret, session):
        engine.hold()
        call = asyncio.create_task(asks(local, secret))
        await engine.wait_until(lambda engine: engine.running == 1)
        session.release()
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await call
        assert session.trace.nodes == []


async def test_a_server_that_has_stopped_is_out_of_reach(model: Model) -> None:
    async with serving(Case("stopped"), model) as (_, local, secret, _):
        url = f"{local.base_url}/v1"
    assert local_server(url) is None
    with pytest.raises(aiohttp.ClientConnectionError, match="is closed"):
        await asks(local, secret)


async def test_a_server_of_another_loop_is_asked_over_http(model: Model) -> None:
    async with serving(Case("loop"), model) as (_, local, _, _):

        async def found() -> LocalServer | None:
            return local_server(f"{local.base_url}/v1")

        assert await found() is local
        assert await asyncio.to_thread(asyncio.run, found()) is None
        assert local_server("http://127.0.0.1:1/v1") is None

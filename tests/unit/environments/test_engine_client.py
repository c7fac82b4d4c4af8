"""The engine client answers and fails as the openai client does."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import openai
import pytest
import verifiers.v1 as vf
from renderers.client import parse_generate_response
from verifiers.v1.clients.base import build_async_openai
from verifiers.v1.errors import model_error
from verifiers.v1.graph import MessageNode, _attribute_routed_experts
from verifiers.v1.types import UserMessage

from gradus.environments.verifiers import engine_client
from gradus.environments.verifiers.engine_client import EngineClient, versions_of_reply
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply, Reset, Status, Stuck, Truncate
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE, ServedPolicy

BODY = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
TOKEN = "the-data-token"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    monkeypatch.setenv("THE_TEAM", "red")


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(reply=lambda _: Reply([7, 8]), data_token=TOKEN) as started:
        yield started


def config_of(engine: ScriptedEngine, **settings: Any) -> vf.TrainClientConfig:
    return vf.TrainClientConfig(base_url=engine.base_url, api_key_var="THE_TOKEN", **settings)


async def ask(client: Any, engine: ScriptedEngine, **options: Any) -> bytes:
    url = f"{engine.base_url}/inference/v1/generate"
    answer = await client.post(url, cast_to=object, body=BODY, **options)
    content: bytes = answer.content
    return content


async def test_the_engine_gets_the_body_the_token_and_the_headers(engine: ScriptedEngine) -> None:
    client = EngineClient(config_of(engine))
    content = await ask(client, engine, options={"headers": {"X-Session-ID": "trace 1"}})
    await client.close()
    assert b'"token_ids":[7,8]' in content.replace(b" ", b"")
    (call,) = engine.calls
    assert (call.prompt_token_ids, call.session_id) == ([1, 2, 3], "trace 1")


async def test_the_context_length_is_found_whatever_the_base_address(
    engine: ScriptedEngine,
) -> None:
    for suffix in ("", "/v1"):
        config = config_of(engine)
        config.base_url += suffix
        client = EngineClient(config)
        models = await client.get("/models", cast_to=object)
        await client.close()
        assert models["data"][0]["max_model_len"] == engine.max_length_tokens


@pytest.mark.shows("F62")
@pytest.mark.parametrize("code", [400, 401, 404, 422, 429, 500, 503])
async def test_an_error_status_carries_what_the_openai_client_says(
    engine: ScriptedEngine, code: int
) -> None:
    said = []
    for client in (EngineClient(config_of(engine)), build_async_openai(config_of(engine))):
        engine.inject(Status(code))
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, engine)
        await client.close()
        found = model_error(caught.value)
        said.append((str(found), found.status_code))
    assert said[0] == said[1]
    assert said[0][1] == code


@pytest.mark.shows("F62")
async def test_a_broken_connection_is_a_connection_error(engine: ScriptedEngine) -> None:
    client = EngineClient(config_of(engine))
    for fault in (Reset(), Truncate()):
        engine.inject(fault)
        with pytest.raises(openai.APIConnectionError) as caught:
            await ask(client, engine)
        assert model_error(caught.value).status_code == 503
    assert await ask(client, engine)
    await client.close()


async def test_an_engine_out_of_reach_is_a_connection_error(engine: ScriptedEngine) -> None:
    client = EngineClient(config_of(engine))
    await engine.close()
    with pytest.raises(openai.APIConnectionError, match="Connection error"):
        await ask(client, engine)
    await client.close()


@pytest.mark.shows("F64")
@pytest.mark.parametrize("api_key_var", ["THE_TOKEN", INFERENCE_TOKEN_VARIABLE])
async def test_an_engine_that_never_answers_is_a_timeout(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, api_key_var: str
) -> None:
    """Also that of a run, of which a call that ended is asked again."""
    monkeypatch.setenv(api_key_var, TOKEN)
    config = config_of(engine, timeout={"read": 0.05}).model_copy(
        update={"api_key_var": api_key_var}
    )
    client = EngineClient(config)
    engine.inject(Stuck())
    with pytest.raises(openai.APITimeoutError) as caught:
        await ask(client, engine)
    assert model_error(caught.value).status_code == 504
    await client.close()


async def test_a_redirect_is_not_followed_with_the_token(engine: ScriptedEngine) -> None:
    client = EngineClient(config_of(engine))
    engine.inject(Status(307))
    with pytest.raises(openai.APIStatusError):
        await ask(client, engine)
    await client.close()


async def test_headers_come_from_the_config_and_the_environment(engine: ScriptedEngine) -> None:
    config = config_of(engine, headers={"X-A": "1"}, headers_from_env={"X-Team": "THE_TEAM"})
    client = EngineClient(config)
    assert client._headers["X-A"] == "1"
    assert client._headers["X-Team"] == "red"
    assert client._headers["Authorization"] == f"Bearer {TOKEN}"
    await client.close()


@asynccontextmanager
async def address() -> AsyncIterator[socket.socket]:
    """A port that outlives the engines behind it, as that of a run does."""
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        yield listener
    finally:
        listener.close()


async def begin(engine: ScriptedEngine, listener: socket.socket) -> ScriptedEngine:
    await engine.start(listener=listener.dup())
    return engine


@pytest.mark.shows("F09")
async def test_a_call_whose_engine_ended_is_answered_by_the_next_once_it_is_told_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kill comes between two turns, and in the middle of the second."""
    monkeypatch.setenv(INFERENCE_TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr("gradus.environments.verifiers.engine_client.AWAY_SECONDS", 0.01)
    async with address() as listener:
        first = await begin(ScriptedEngine(data_token=TOKEN), listener)
        first.served = served = ServedPolicy("run", 0, 3, "digest")
        config = config_of(first)
        config.api_key_var = INFERENCE_TOKEN_VARIABLE
        client = EngineClient(config)
        sampling = {"max_tokens": 4, "seed": 5}
        body = {**BODY, "sampling_params": sampling, "cache_salt": "v3"}
        url = f"{first.base_url}/inference/v1/generate"
        await client.post(url, body=body)
        first.hold()
        asking = asyncio.create_task(client.post(url, body={**body, "token_ids": [1, 2, 3, 4]}))
        await first.wait_until(lambda engine: engine.running == 1)
        await first.close()
        stale = ScriptedEngine(data_token=TOKEN).await_version()
        await begin(stale, listener)
        later = asyncio.create_task(client.post(url, body={**body, "token_ids": [9]}))
        done, _ = await asyncio.wait({asking, later}, timeout=0.1)
        assert (done, stale.calls) == (set(), [])
        stale.served = served
        async with asyncio.timeout(60):
            await asyncio.gather(asking, later)
        await client.close()
        await stale.close()
    asked, again = first.calls[1], stale.calls
    (found,) = [call for call in again if call.prompt_token_ids == asked.prompt_token_ids]
    assert found.sampling_params == asked.sampling_params
    assert (found.cache_salt, found.version, len(again)) == ("v3", 3, 2)
    assert stale.asked_again == 2


async def test_the_end_of_another_engine_is_an_error_at_once(engine: ScriptedEngine) -> None:
    client = EngineClient(config_of(engine))
    await engine.close()
    with pytest.raises(openai.APIConnectionError):
        await ask(client, engine)
    await client.close()


async def test_the_versions_that_sampled_a_reply_are_known_by_its_id(
    engine: ScriptedEngine,
) -> None:
    client = EngineClient(config_of(engine))
    engine.hold()
    asked = asyncio.ensure_future(ask(client, engine))
    await engine.wait_until(lambda it: it.running == 1)
    engine.served = msgspec.structs.replace(engine.served, version=1)
    engine.release()
    reply = await asked
    # What a task learned is its own; here as the one coroutine that a model call is.
    again = msgspec.json.decode(await ask(client, engine))
    await client.close()
    assert msgspec.json.decode(reply)["kv_transfer_params"] == {"policy_versions": [[0, 1], [1, 1]]}
    assert versions_of_reply(again["request_id"]) == [(1, 2)]
    assert versions_of_reply("another") == []


def npy_in_base64(experts: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def test_experts_of_a_reply_reach_verifiers() -> None:
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    body = {"sampling_params": {"routed_experts_prompt_start": 4}}
    choice = {"index": 0, "routed_experts": npy_in_base64(experts)}
    content = msgspec.json.encode({"choices": [choice]})
    readable = engine_client._with_readable_experts(content, body)
    told = parse_generate_response(readable)["choices"][0]["routed_experts"]
    node = MessageNode(message=UserMessage(content="a"), token_ids=[1, 2], sampled=False)
    trace = SimpleNamespace(nodes=[node])
    # Two tokens from position 5 on, of what was told from position 4 on.
    _attribute_routed_experts(cast("Any", trace), [], [0], 5, told)
    assert node.routed_experts is not None
    assert node.routed_experts.tolist() == experts[1:].tolist()
    silent = b'{"choices": []}'
    assert engine_client._with_readable_experts(silent, body) is silent

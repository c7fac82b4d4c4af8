"""Requests that share a token connection: answered, cancelled and failed each for itself."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import verifiers.v1 as vf
from aiohttp import web
from renderers.client import parse_generate_response

from gradus.environments.verifiers.engine_client import EngineClient
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import AnyBody, Reply, Reset, Status, Stuck, Truncate
from gradus.wire.token_stream import MAX_FRAME_BYTES

TOKEN = "the-data-token"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def first_token_again(prompt: list[int]) -> Reply:
    return Reply([prompt[0], 5], [-0.5, -1.5])


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(reply=first_token_again, data_token=TOKEN) as started:
        yield started


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    opened = EngineClient(config_of(engine.base_url))
    yield opened
    await opened.close()


def config_of(base_url: str, **settings: Any) -> vf.TrainClientConfig:
    return vf.TrainClientConfig(base_url=base_url, api_key_var="THE_TOKEN", **settings)


async def ask(client: EngineClient, number: int = 1, **more: Any) -> dict[str, Any]:
    url = f"{client.base_url.removesuffix('/v1')}/inference/v1/generate"
    sampling = {"max_tokens": 4, "logprobs": 1}
    body = {"model": "policy", "token_ids": [number, 2, 3], "sampling_params": sampling}
    answer = await client.post(url, body=body | more)
    parsed: dict[str, Any] = parse_generate_response(answer.content)
    return parsed


def ordinary(engine: ScriptedEngine) -> EngineClient:
    """A client with a header of its own, which only HTTP carries."""
    return EngineClient(config_of(engine.base_url, headers={"X-Own": "1"}))


async def test_a_request_that_no_message_can_hold_fails_as_over_http_and_alone(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    await ask(client)
    sampling = {"max_tokens": 4, "logprobs": 1}
    wide, odd = sampling | {"number": 2**70}, sampling | {"text": "\ud800"}
    async with asyncio.timeout(60):
        said = await asyncio.gather(
            ask(client, 1),
            ask(client, 2, sampling_params=wide),
            ask(client, 3, sampling_params=odd),
            ask(client, 4),
            return_exceptions=True,
        )
    assert isinstance(said[2], UnicodeEncodeError)
    for number in (1, 2, 4):
        answer = said[number - 1]
        assert isinstance(answer, dict), answer
        assert answer["choices"][0]["token_ids"] == [number, 5]


@pytest.mark.slow
async def test_prompts_that_one_frame_cannot_hold_are_asked_all_the_same(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    prompt = [1] * 60_000
    num_prompts = MAX_FRAME_BYTES // (4 * len(prompt)) + 1
    asked = [ask(client, token_ids=prompt) for _ in range(num_prompts)]
    # Over an open connection all of them are sent in the same round of the loop.
    await ask(client)
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        # The engine read it, and has a context of its own.
        assert isinstance(answer, openai.APIStatusError), answer
        assert "the prompt has 60000" in str(answer)


async def test_both_routes_say_the_same(engine: ScriptedEngine, client: EngineClient) -> None:
    other = ordinary(engine)
    said = [await ask(client, 7), await ask(other, 7)]
    await other.close()
    for answer in said:
        choice, entries = answer["choices"][0], answer["choices"][0]["logprobs"]["content"]
        assert choice["token_ids"] == [7, 5]
        assert [entry["logprob"] for entry in entries] == [-0.5, -1.5]
        assert [entry["token"] for entry in entries] == ["token_id:7", "token_id:5"]
    for key in ("finish_reason", "index"):
        assert said[0]["choices"][0][key] == said[1]["choices"][0][key]
    assert said[0]["usage"].items() <= said[1]["usage"].items()


async def test_thousands_of_requests_share_one_connection(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    engine.hold()
    asked = [asyncio.ensure_future(ask(client, number)) for number in range(1, 4001)]
    await engine.wait_until(lambda e: e.running == 4000)
    (connection,) = engine._answering
    engine.release()
    answers = await asyncio.gather(*asked)
    assert [answer["choices"][0]["token_ids"][0] for answer in answers] == [*range(1, 4001)]
    assert engine._answering[connection] == {}


async def test_a_request_that_nobody_waits_for_ends_in_the_engine(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    engine.hold()
    kept, dropped = (asyncio.ensure_future(ask(client, number)) for number in (1, 2))
    await engine.wait_until(lambda e: e.running == 2)
    dropped.cancel()
    await engine.wait_until(lambda e: e.running == 1)
    engine.release()
    assert (await kept)["choices"][0]["token_ids"] == [1, 5]


async def test_a_client_that_goes_away_ends_all_its_requests(engine: ScriptedEngine) -> None:
    engine.hold()
    client = EngineClient(config_of(engine.base_url))
    asked = [asyncio.ensure_future(ask(client, number)) for number in range(1, 9)]
    await engine.wait_until(lambda e: e.running == 8)
    await client.close()
    await engine.wait_until(lambda e: e.running == 0)
    failed = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(error) for error in failed} == {openai.APIConnectionError}


@pytest.mark.shows("F09", "F62")
@pytest.mark.parametrize("fault", [Reset(), Truncate()], ids=["reset", "half a frame"])
async def test_a_broken_connection_fails_what_runs_and_is_opened_again(
    engine: ScriptedEngine, client: EngineClient, fault: Reset | Truncate
) -> None:
    engine.hold()
    running = asyncio.ensure_future(ask(client, 1))
    await engine.wait_until(lambda e: e.running == 1)
    engine.inject(fault)
    for broken in (ask(client, 2), running):
        with pytest.raises(openai.APIConnectionError, match="the engine closed the connection"):
            await broken
    engine.release()
    assert (await ask(client, 3))["choices"][0]["token_ids"] == [3, 5]


@pytest.mark.shows("F09")
async def test_an_engine_that_is_started_again_is_found_again(client: EngineClient) -> None:
    async with ScriptedEngine(reply=first_token_again, data_token=TOKEN) as first:
        client = EngineClient(config_of(first.base_url))
        await ask(client)
        port = first._port
    with pytest.raises(openai.APIConnectionError):
        await ask(client)
    again = ScriptedEngine(reply=first_token_again, data_token=TOKEN)
    await again.start(port=port)
    assert (await ask(client, 4))["choices"][0]["token_ids"] == [4, 5]
    await client.close()
    await again.close()


@pytest.mark.shows("F64")
async def test_one_late_answer_times_out_alone(engine: ScriptedEngine) -> None:
    client = EngineClient(config_of(engine.base_url, timeout={"read": 0.2}))
    engine.inject(Stuck())
    late = asyncio.ensure_future(ask(client, 1))
    await engine.wait_until(lambda e: e.running == 1)
    assert (await ask(client, 2))["choices"][0]["token_ids"] == [2, 5]
    with pytest.raises(openai.APITimeoutError):
        await late
    await engine.wait_until(lambda e: e.running == 0)
    await client.close()


async def test_a_refusal_has_the_words_of_the_ordinary_route(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    other = ordinary(engine)
    bodies: list[dict[str, Any]] = [{"model": "no-such"}, {"token_ids": [1] * 5000}]
    for body in bodies:
        said = []
        for asked in (client, other):
            with pytest.raises(openai.APIStatusError) as error:
                await ask(asked, **body)
            said.append((str(error.value), error.value.status_code))
        assert said[0] == said[1]
        assert said[0][1] == 400
    await other.close()


async def test_a_wrong_token_is_refused_as_before(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_TOKEN", "wrong")
    client = EngineClient(config_of(engine.base_url))
    with pytest.raises(openai.APIStatusError, match="missing or wrong bearer token") as error:
        await ask(client)
    assert error.value.status_code == 401
    assert engine.calls == []
    await client.close()


@pytest.mark.parametrize("more", [{"features": None}, {"return_token_ids": True}])
async def test_a_body_that_says_more_goes_the_ordinary_way(
    engine: ScriptedEngine, client: EngineClient, more: dict[str, Any]
) -> None:
    engine.inject(AnyBody(b'{"choices": [{"token_ids": [42]}]}'))
    assert (await ask(client, **more))["choices"][0]["token_ids"] == [42]


@pytest.mark.shows("F38")
async def test_a_logprob_that_is_no_number_is_left_to_the_reader(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    engine.reply = lambda _: Reply([5], [math.nan], ends_with_stop=False)
    (entry,) = (await ask(client))["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] is None


async def test_an_engine_without_the_route_is_asked_over_http() -> None:
    paths: list[str] = []

    async def plain(request: web.BaseRequest) -> web.Response:
        paths.append(request.path)
        if request.method == "GET":
            return web.Response(status=404)
        asked = json.loads(await request.read())
        return web.json_response({"choices": [{"token_ids": asked["token_ids"]}]})

    runner = web.ServerRunner(web.Server(plain))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = EngineClient(config_of(f"http://127.0.0.1:{runner.addresses[0][1]}/v1"))
    for number in (1, 2):
        assert (await ask(client, number))["choices"][0]["token_ids"] == [number, 2, 3]
    await client.close()
    await runner.cleanup()
    assert paths == ["/gradus/tokens", *["/inference/v1/generate"] * 2]


@pytest.mark.shows("F62")
async def test_an_error_status_fails_one_request(
    engine: ScriptedEngine, client: EngineClient
) -> None:
    engine.inject(Status(503))
    with pytest.raises(openai.APIStatusError, match="scripted") as error:
        await ask(client)
    assert error.value.status_code == 503
    assert (await ask(client, 6))["choices"][0]["token_ids"] == [6, 5]

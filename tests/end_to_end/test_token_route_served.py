"""The token route of a real vLLM server: what it answers is what vLLM's own route answers."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import verifiers.v1 as vf
from running import RunningInference
from safetensors.torch import load_file

from gradus.environments.verifiers.engine_client import EngineClient
from gradus.weights.filesystem import FilesystemWeights

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

PROMPT = [5, 9, 13, 21, 34, 55, 17, 8]


class Routes:
    """Asks the same server over the token route and over vLLM's own."""

    def __init__(self, server: RunningInference) -> None:
        self.server = server
        config = vf.TrainClientConfig(base_url=server.base_url, api_key_var="ROUTE_TOKEN")
        self.stream = EngineClient(config)
        self.ordinary = EngineClient(config)

    async def ask(self, client: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
        """The one choice of the answer."""
        if client is self.ordinary:
            body = {**body, "stream": False}  # The token route knows no such key.
        answer = await client.post(f"{self.server.base_url}/inference/v1/generate", body=body)
        choice: dict[str, Any] = msgspec.json.decode(answer.content)["choices"][0]
        return choice

    async def both(self, **changes: Any) -> list[dict[str, Any]]:
        """The choice of each route for the same body."""
        return [await self.ask(client, body_of(**changes)) for client in self.clients]

    @property
    def clients(self) -> tuple[EngineClient, EngineClient]:
        """The new route first."""
        return self.stream, self.ordinary

    async def status(self) -> dict[str, Any]:
        """What the engine says about itself."""
        headers = {"Authorization": f"Bearer {self.server.data_token}"}
        async with (
            aiohttp.ClientSession(self.server.base_url, headers=headers) as session,
            session.get("/gradus/status") as response,
        ):
            found: dict[str, Any] = await response.json()
            return found

    async def wait_running(self, count: int) -> None:
        """Return once so many requests run."""
        async with asyncio.timeout(60):
            while (await self.status())["running"] != count:
                pass  # asking takes its own time


def body_of(*, model: str = "policy", token_ids: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 1.0, "max_tokens": 24, "logprobs": 1, "stop_token_ids": [4]}
    params |= {"skip_special_tokens": False, **sampling}
    return {
        "model": model,
        "token_ids": token_ids,
        "sampling_params": {name: value for name, value in params.items() if value is not None},
        "cache_salt": "same",
    }


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


@pytest.fixture
async def routes(
    inference_server: RunningInference, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Routes]:
    monkeypatch.setenv("ROUTE_TOKEN", inference_server.data_token)
    opened = Routes(inference_server)
    yield opened
    for client in opened.clients:
        await client.close()


SAMPLING: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "temperature": 0.6},
    {"seed": 3, "top_p": 0.7, "top_k": 20, "min_p": 0.01},
    {"seed": 4, "ignore_eos": True, "min_tokens": 24},
    {"seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"seed": 6, "stop_token_ids": [*range(3, 40)]},
    {"temperature": 0.0},
    {"seed": 7, "max_tokens": 1},
    {"seed": 8, "max_tokens": None, "stop_token_ids": [*range(3, 12)]},
    {"seed": 9, "logit_bias": {"20": 5.0}},
    {"seed": 10, "bad_words": []},
    {"seed": 11, "stop": ["e", "zz", "a "]},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda chosen: ",".join(chosen))
async def test_tokens_and_logprobs_are_bitwise_those_of_vllms_route(
    routes: Routes, sampling: dict[str, Any]
) -> None:
    new, old = await routes.both(**sampling)
    assert new["token_ids"] == old["token_ids"]
    assert logprobs_of(new) == logprobs_of(old)
    assert len(new["token_ids"]) == len(logprobs_of(new)) > 0
    assert new["finish_reason"] == old["finish_reason"]


@pytest.mark.parametrize(
    "sampling",
    [{"n": 2}, {"logprobs": 3}, {"prompt_logprobs": 1}, {"seed": 1 << 40}],
    ids=lambda chosen: ",".join(chosen),
)
async def test_what_the_route_does_not_know_is_answered_by_vllms_route(
    routes: Routes, sampling: dict[str, Any]
) -> None:
    new, old = await routes.both(**{"seed": 3} | sampling)
    assert new["token_ids"] == old["token_ids"]
    assert new["logprobs"]["content"][0].items() <= old["logprobs"]["content"][0].items()


REFUSED: list[dict[str, Any]] = [
    {"token_ids": [1] * 2000},
    {"token_ids": [1] * 1024},
    {"token_ids": []},
    {"token_ids": [-1]},
    {"token_ids": [10**6]},
    {"model": "no-such-model"},
    {"temperature": -1.0},
    {"temperature": math.nan},
    {"max_tokens": 0},
    {"top_p": 7},
    {"no_such_parameter": 1},
    {"seed": "many"},
]


@pytest.mark.parametrize("changes", REFUSED, ids=lambda c: f"{next(iter(c))}={str(c)[-12:-1]}")
async def test_refusals_have_the_class_and_the_text_of_vllms_route(
    routes: Routes, changes: dict[str, Any]
) -> None:
    said = []
    for client in routes.clients:
        try:
            said.append(("answered", len(await routes.ask(client, body_of(**changes))) > 0, ""))
        except openai.APIStatusError as error:
            said.append((type(error).__name__, error.status_code, str(error)))
    assert said[0] == said[1]
    assert len((await routes.ask(routes.stream, body_of(seed=1)))["token_ids"]) > 0


async def test_many_requests_are_answered_each_with_its_own_seed(routes: Routes) -> None:
    before = await routes.status()
    asked = [body_of(seed=n, ignore_eos=True, stop_token_ids=[]) for n in range(300)]
    choices = await asyncio.gather(*(routes.ask(routes.stream, body) for body in asked))
    assert {len(choice["token_ids"]) for choice in choices} == {24}
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 290
    after = await routes.status()
    assert after["generated_tokens"] - before["generated_tokens"] == 300 * 24
    assert after["prompt_tokens"] - before["prompt_tokens"] == 300 * len(PROMPT)
    assert (after["running"], after["waiting"]) == (0, 0)


async def test_requests_of_a_client_that_goes_away_end_in_the_engine(
    routes: Routes, inference_server: RunningInference
) -> None:
    long = body_of(seed=1, max_tokens=1000, ignore_eos=True, stop_token_ids=[])
    other = Routes(inference_server)
    gone = [asyncio.ensure_future(other.ask(other.stream, long)) for _ in range(6)]
    kept = asyncio.ensure_future(routes.ask(routes.stream, long))
    cancelled = asyncio.ensure_future(routes.ask(routes.stream, long))
    await routes.wait_running(8)
    cancelled.cancel()
    await other.stream.close()
    await routes.wait_running(1)
    assert len((await kept)["token_ids"]) == 1000
    failed = await asyncio.gather(*gone, return_exceptions=True)
    assert {type(error) for error in failed} == {openai.APIConnectionError}


async def test_requests_run_on_through_a_weight_change(routes: Routes) -> None:
    server = routes.server
    weights = FilesystemWeights(server.run_dir, term=server.term, extra_files={}, keep_published=3)
    version = (await routes.status())["version"] + 1
    tensors = load_file(server.model_dir / "model.safetensors")
    shifted = {name: (t.float() * (1 + version / 64)).to(t.dtype) for name, t in tensors.items()}
    shutil.rmtree(server.run_dir.version(version), ignore_errors=True)
    published = weights.publish_version(version, shifted.items())
    long = body_of(seed=1, max_tokens=900, ignore_eos=True, stop_token_ids=[])
    running = [asyncio.ensure_future(routes.ask(routes.stream, long)) for _ in range(8)]
    await routes.wait_running(8)
    request = {"run_id": server.run_id, "term": server.term, "version": version}
    request |= {"directory": str(published.directory), "digest": published.digest}
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    async with (
        aiohttp.ClientSession(server.base_url, headers=headers) as session,
        session.post("/gradus/apply", json=request) as response,
    ):
        assert response.status == 200, await response.text()
    assert not any(task.done() for task in running)
    during = await routes.status()
    choices = await asyncio.gather(*running)
    assert [len(choice["token_ids"]) for choice in choices] == [900] * 8
    assert all(math.isfinite(value) for choice in choices for value in logprobs_of(choice))
    after = await routes.status()
    assert (after["version"], after["is_paused"], after["running"]) == (version, False, 0)
    assert during["generated_tokens"] <= after["generated_tokens"]


async def test_a_request_without_a_salt_never_meets_the_cache_of_older_weights(
    routes: Routes,
) -> None:
    unsalted = body_of(token_ids=PROMPT * 40, temperature=0.0, max_tokens=4)
    del unsalted["cache_salt"]
    before = await routes.status()
    await routes.ask(routes.stream, unsalted)
    await routes.ask(routes.ordinary, unsalted)
    after = await routes.status()
    # The second finds the blocks of the first, so both have the same salt.
    assert after["prefix_hits"] - before["prefix_hits"] >= 256


async def test_the_replies_to_one_prompt_compute_it_once(routes: Routes) -> None:
    before = await routes.status()
    for seed in range(3):
        await routes.ask(routes.stream, body_of(token_ids=[*range(8, 50)], seed=seed))
    after = await routes.status()
    assert after["prefix_hits"] - before["prefix_hits"] == 2 * 32


async def test_a_wrong_token_opens_no_route(
    inference_server: RunningInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTE_TOKEN", "w" * 64)
    routes = Routes(inference_server)
    with pytest.raises(openai.APIStatusError, match="missing or wrong bearer token"):
        await routes.ask(routes.stream, body_of())
    await routes.stream.close()

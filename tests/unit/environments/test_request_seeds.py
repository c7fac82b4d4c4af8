"""Each model call of an episode draws with random numbers of its own."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
import zmq
from verifiers.v1.clients import eval as eval_client

from gradus.environments.verifiers import replies
from gradus.environments.verifiers.engine_client import EngineClient, RequestSeeds
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply


def generate(prompt: list[int], seed: int | None = 7) -> dict[str, Any]:
    seeded = {} if seed is None else {"seed": seed}
    return {"token_ids": prompt, "sampling_params": {"max_tokens": 4, **seeded}}


def chat(text: str, seed: int = 7) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "seed": seed}


def seed_of(body: Any) -> int:
    found: int = body.get("sampling_params", body)["seed"]
    return found


def test_two_turns_of_an_episode_never_share_a_seed() -> None:
    seeds = RequestSeeds()
    turns = [seeds.renewed(generate([1, 2, 3][:length])) for length in (1, 2, 3)]
    assert len({seed_of(body) for body in turns}) == 3


def test_players_who_are_told_the_same_draw_different_moves() -> None:
    seeds = RequestSeeds()
    moves = [seeds.renewed(generate([5, 6])) for _ in range(4)]
    assert len({seed_of(body) for body in moves}) == 4


def test_the_same_episode_gets_the_same_seeds_in_any_order_of_its_prompts() -> None:
    prompts = [[1], [2], [1], [3]]
    first, second = RequestSeeds(), RequestSeeds()
    forwards = [seed_of(first.renewed(generate(p))) for p in prompts]
    backwards = [seed_of(second.renewed(generate(p))) for p in reversed(prompts)]
    assert sorted(forwards) == sorted(backwards)
    assert forwards[1] == backwards[2]


def test_an_episode_that_is_played_again_gets_the_seeds_that_it_had() -> None:
    seeds = RequestSeeds()
    other = seed_of(seeds.renewed(generate([1], 8)))
    plays = []
    for _ in range(2):
        seeds.begin(7)
        plays.append([seed_of(seeds.renewed(generate([1]))) for _ in range(2)])
    assert plays[0] == plays[1]
    assert len(set(plays[0])) == 2
    assert seed_of(seeds.renewed(generate([1], 8))) != other


@pytest.mark.shows("F05")
async def test_an_episode_that_is_asked_for_again_is_played_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[str] = []

    gone = asyncio.Event()

    async def run(_: object, request: Any, client: bytes, name: bytes) -> bytes:
        if client == b"first":
            await gone.wait()
        played.append(f"{request.sampling.seed} {client.decode()}")
        return name

    monkeypatch.setattr(replies.EnvServer, "_run", run)
    replies.play_again_as_at_first(RequestSeeds())
    monkeypatch.setattr(replies, "SETTLE_SECONDS", 0.0)
    left: set[bytes] = set()

    async def send(parts: list[bytes]) -> None:
        if parts[0] in left:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    server = SimpleNamespace(frontend=SimpleNamespace(send_multipart=send))
    request = SimpleNamespace(sampling=SimpleNamespace(seed=7))
    ask = functools.partial(replies.EnvServer._run, server, request)
    first = [asyncio.create_task(ask(b"first", name)) for name in (b"1", b"2")]
    await asyncio.sleep(0)
    assert await ask(b"another", b"0") == b"0"
    assert not any(it.done() for it in first), "who is there loses no episode to another"
    left.add(b"first")
    assert await ask(b"second", b"3") == b"3"
    ended = await asyncio.gather(*first, return_exceptions=True)
    assert [type(it) for it in ended] == [asyncio.CancelledError] * 2
    assert played == ["7 another", "7 second"]
    both = [asyncio.create_task(ask(b"first", name)) for name in (b"4", b"5")]
    await asyncio.sleep(0)
    gone.set()
    assert await asyncio.gather(*both) == [b"4", b"5"], "one client may ask for the same twice"


def test_episodes_with_different_seeds_draw_differently() -> None:
    seeds = RequestSeeds()
    assert seed_of(seeds.renewed(generate([1], 1))) != seed_of(seeds.renewed(generate([1], 2)))


@pytest.mark.parametrize(
    "body", [generate([1], None), {"messages": []}, chat("a") | {"seed": None}]
)
def test_a_request_without_a_seed_stays_as_it_is(body: dict[str, Any]) -> None:
    assert RequestSeeds().renewed(body) is body


def test_only_the_seed_changes_and_fits_a_signed_integer() -> None:
    body = {**generate([1]), "cache_salt": "v3"}
    renewed = RequestSeeds().renewed(body)
    assert 0 <= seed_of(renewed) < 2**31
    assert {**renewed, "sampling_params": body["sampling_params"]} == body
    assert body["sampling_params"]["seed"] == 7


def test_a_chat_request_is_told_apart_by_its_messages() -> None:
    seeds = RequestSeeds()
    asked = [chat("a"), chat("b"), chat("a"), {"prompt": "a", "seed": 7}]
    assert len({seed_of(seeds.renewed(body)) for body in asked}) == 4


def test_the_oldest_prompt_is_forgotten_first() -> None:
    seeds = RequestSeeds(remembered_prompts=2)
    first = seed_of(seeds.renewed(generate([1])))
    for prompt in ([2], [3]):
        seeds.renewed(generate(prompt))
    assert seed_of(seeds.renewed(generate([1]))) == first


async def test_the_engine_gets_the_seed_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", "data-token")
    async with ScriptedEngine(reply=lambda _: Reply([7])) as engine:
        config = vf.TrainClientConfig(base_url=engine.base_url, api_key_var="THE_TOKEN")
        seeds = RequestSeeds()
        for _ in ("first seat", "second seat"):
            client = EngineClient(config, seeds=seeds)
            url = f"{engine.base_url}/inference/v1/generate"
            await client.post(url, body={"model": "policy", **generate([1, 2])})
            await client.close()
    first, second = (call.sampling_params["seed"] for call in engine.calls)
    assert first != second


async def test_other_models_get_the_seed_of_the_request_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    async def send(client: Any, url: str, body: Any, headers: Any, *, stream: bool = False) -> None:
        sent.append(body)

    monkeypatch.setattr(eval_client.EvalClient, "_request", send)
    replies.seed_each_request(RequestSeeds())
    replies.seed_each_request(RequestSeeds())
    for text in ("a", "b"):
        await eval_client.EvalClient._request(None, "url", chat(text), None, stream=True)  # type: ignore[arg-type]
    assert len({7, *map(seed_of, sent)}) == 3


async def test_an_episode_without_a_seed_is_played_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(_: Any, request: Any, client: bytes, name: bytes) -> bytes:
        assert request.sampling is not None
        return name

    monkeypatch.setattr(replies.EnvServer, "_run", run)
    replies.play_again_as_at_first(RequestSeeds())
    unseeded: Any = SimpleNamespace(sampling=vf.SamplingConfig(temperature=1.0))
    assert await replies.EnvServer._run(None, unseeded, b"client", b"played") == b"played"

"""A worker's calls find a replica that is up, stay there, and are asked again where it is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import verifiers.v1 as vf

from gradus.environments.policy import replicas as routing
from gradus.environments.policy.replicas import MAX_LOSSES, Replica, Replicas
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.files import write_atomically
from gradus.testing.engine import ScriptedEngine
from gradus.testing.engine_script import Reply, Reset, Status
from gradus.wire.inference import FILE_SCHEME, ServedPolicy, join_addresses

TOKEN = "the-data-token"
SESSIONS = [f"trace {number}" for number in range(400)]


def known(number: int) -> Replicas:
    async def is_there(_: str, __: bool) -> bool:
        return False

    names = [f"http://127.0.0.1:{8000 + index}" for index in range(number)]
    return Replicas(names, is_there=is_there)


def homes(replicas: Replicas, sessions: list[str] = SESSIONS) -> dict[str, str]:
    found = {}
    for session in sessions:
        replica = replicas.choose(session)
        assert replica is not None
        found[session] = replica.address
    return found


def test_sessions_spread_over_the_replicas_and_each_stays_at_its_own() -> None:
    replicas = known(3)
    first = homes(replicas)
    assert all(100 < count < 170 for count in Counter(first.values()).values())
    for replica in replicas.all:
        replica.in_flight = random.Random(replica.address).randrange(100)
    assert homes(replicas) == first


def test_workers_that_never_talk_choose_alike() -> None:
    assert homes(known(4)) == homes(known(4), SESSIONS)


def test_a_lost_replica_moves_its_own_sessions_only() -> None:
    replicas = known(3)
    first = homes(replicas)
    gone = replicas.all[1]
    gone.is_up = False
    after = homes(replicas)
    assert {s for s in SESSIONS if first[s] != after[s]} == {
        s for s in SESSIONS if first[s] == gone.address
    }
    gone.is_up = True
    # What moved stays: its prefixes are where it went.
    assert homes(replicas) == after


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_no_replica_gets_a_new_session_beyond_its_share(number: int) -> None:
    replicas, chance = known(number), random.Random(number)
    for session in range(2_000):
        replica = replicas.choose(f"{session}")
        assert replica is not None
        replica.in_flight += 1
        total = sum(it.in_flight for it in replicas.all)
        assert replica.in_flight <= 1.25 * total / number + 1
        busy = [it for it in replicas.all if it.in_flight]
        if chance.random() < 0.6 and busy:
            chance.choice(busy).in_flight -= 1


def test_without_a_session_the_least_busy_replica_is_asked() -> None:
    replicas = known(2)
    replicas.all[0].in_flight = 1
    assert replicas.choose(None) is replicas.all[1]


def test_sessions_that_are_long_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "REMEMBERED_SESSIONS", 10)
    replicas = known(2)
    homes(replicas)
    assert len(replicas._sessions) == 10


# ---------------------------------------------------------------------- two engines


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    monkeypatch.setattr(routing, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(routing, "FIRST_DELAY_SECONDS", 0.02)


@pytest.fixture
async def engines() -> AsyncIterator[list[ScriptedEngine]]:
    async with AsyncExitStack() as stack:
        made = [ScriptedEngine(reply=lambda _: Reply([7, 8]), data_token=TOKEN) for _ in range(2)]
        yield [await stack.enter_async_context(engine) for engine in made]


@pytest.fixture
async def client(engines: list[ScriptedEngine]) -> AsyncIterator[EngineClient]:
    config = vf.TrainClientConfig(
        base_url=join_addresses([engine.base_url for engine in engines]), api_key_var="THE_TOKEN"
    )
    made = EngineClient(config)
    yield made
    await made.close()


async def ask(client: EngineClient, session: str, **body: Any) -> bytes:
    options = {"headers": {"X-Session-ID": session}}
    sampling = {"max_tokens": 4, "seed": 3}
    body = {"token_ids": [1, 2], "sampling_params": sampling, **body}
    url = f"{client.base_url}/inference/v1/generate"
    return (await client.post(url, body=body, options=options)).content


def of(engines: list[ScriptedEngine], replica: Replica) -> tuple[ScriptedEngine, ScriptedEngine]:
    """The engine of a replica, and the other."""
    mine, other = engines
    return (mine, other) if mine.base_url == replica.address else (other, mine)


def chosen(client: EngineClient, session: str) -> Replica:
    assert client._replicas is not None
    replica = client._replicas.choose(session)
    assert replica is not None
    return replica


@pytest.mark.parametrize("body", [{}, {"features": None}])
async def test_a_conversation_stays_at_one_replica_and_many_use_both(
    engines: list[ScriptedEngine], client: EngineClient, body: dict[str, Any]
) -> None:
    for _ in range(2):
        await asyncio.gather(*(ask(client, session, **body) for session in SESSIONS[:40]))
    seen = [Counter(call.session_id for call in engine.calls) for engine in engines]
    assert all(len(sessions) >= 10 for sessions in seen)
    assert not seen[0].keys() & seen[1].keys()
    assert set((seen[0] + seen[1]).values()) == {2}


@pytest.mark.shows("F09")
@pytest.mark.parametrize("body", [{}, {"features": None}])
async def test_a_call_whose_replica_ends_is_asked_again_elsewhere_with_its_seed_and_salt(
    engines: list[ScriptedEngine], client: EngineClient, body: dict[str, Any]
) -> None:
    mine, other = of(engines, chosen(client, "trace"))
    mine.hold()
    running = asyncio.ensure_future(ask(client, "trace", cache_salt="v0", **body))
    await mine.wait_until(lambda engine: engine.running == 1)
    await mine.close()
    assert b"[7,8]" in await running
    (first,), (again,) = mine.calls, other.calls
    assert first.sampling_params == again.sampling_params
    assert (first.cache_salt, first.session_id) == (again.cache_salt, again.session_id)


@pytest.mark.shows("F11")
@pytest.mark.parametrize("body", [{}, {"features": None}])
async def test_a_replica_that_does_not_answer_any_more_loses_its_calls(
    engines: list[ScriptedEngine],
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
) -> None:
    monkeypatch.setattr(routing, "CHECK_SECONDS", 0.5)
    replica = chosen(client, "trace")
    mine, other = of(engines, replica)
    silent = asyncio.Event()
    is_there = client._is_there

    async def stopped(address: str, is_settled: bool) -> bool:
        if address == replica.address and not silent.is_set():
            await silent.wait()
        return await is_there(address, is_settled)

    assert client._replicas is not None
    monkeypatch.setattr(client._replicas, "_is_there", stopped)
    mine.hold()
    assert b"[7,8]" in await ask(client, "trace", **body)
    assert (len(mine.calls), len(other.calls)) == (1, 1)
    silent.set()
    async with asyncio.timeout(60), client._replicas._returned:
        await client._replicas._returned.wait_for(lambda: replica.is_up)


@pytest.mark.shows("F09", "I3")
async def test_a_replica_with_older_weights_answers_nothing_until_it_has_the_version(
    engines: list[ScriptedEngine], client: EngineClient
) -> None:
    replica = chosen(client, "trace")
    mine, other = of(engines, replica)
    other.served = ServedPolicy("run", 0, 4, "digest")
    for body in ({}, {"features": None}):
        assert b"[7,8]" in await ask(client, "trace", cache_salt="v4", **body)
    assert not mine.calls
    assert {call.version for call in other.calls} == {4}
    assert b"[7,8]" in await ask(client, "an episode that began before", cache_salt="v0")


@pytest.mark.shows("F09")
async def test_a_replica_that_was_not_told_its_version_is_not_asked_until_it_was(
    engines: list[ScriptedEngine], client: EngineClient
) -> None:
    replica = chosen(client, "trace")
    mine, other = of(engines, replica)
    mine.await_version()
    assert b"[7,8]" in await ask(client, "trace", cache_salt="v0")
    assert (len(mine.calls), len(other.calls)) == (0, 1)
    mine.served = ServedPolicy("run", 0, 0, None)
    assert client._replicas is not None
    async with asyncio.timeout(60), client._replicas._returned:
        await client._replicas._returned.wait_for(lambda: replica.is_up)


async def test_calls_wait_while_every_replica_is_lost(
    engines: list[ScriptedEngine], client: EngineClient
) -> None:
    for engine in engines:
        engine.served = ServedPolicy("run", 0, 1, "digest")
    running = asyncio.ensure_future(ask(client, "trace", cache_salt="v2"))
    while client._replicas is None or any(it.is_up for it in client._replicas.all):
        await asyncio.sleep(0)
    engines[0].served = ServedPolicy("run", 0, 2, "digest")
    assert b"[7,8]" in await running
    assert {call.version for call in engines[0].calls} == {2}
    assert not engines[1].calls


@pytest.mark.shows("F09")
async def test_a_call_under_which_replicas_end_again_and_again_fails(
    engines: list[ScriptedEngine], client: EngineClient
) -> None:
    for engine in engines:
        engine.inject(Reset(), times=MAX_LOSSES)
    with pytest.raises(openai.APIConnectionError):
        await ask(client, "trace")
    assert sum(len(engine.calls) for engine in engines) == MAX_LOSSES


async def test_what_a_replica_refuses_is_asked_nowhere_else(
    engines: list[ScriptedEngine], client: EngineClient
) -> None:
    for engine in engines:
        engine.inject(Status(400))
    with pytest.raises(openai.APIStatusError):
        await ask(client, "trace")
    assert sum(len(engine.calls) for engine in engines) == 1


# ---------------------------------------------------------------------- servers that come and go


@pytest.fixture
async def follower(
    engines: list[ScriptedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EngineClient, Path]]:
    """A client of the servers in a file, which names the first engine."""
    monkeypatch.setattr(routing, "FOLLOW_SECONDS", 0.02)
    file = tmp_path / "servers"
    file.write_text(f"{engines[0].base_url}\n")
    config = vf.TrainClientConfig(base_url=f"{FILE_SCHEME}{file}", api_key_var="THE_TOKEN")
    made = EngineClient(config)
    yield made, file
    await made.close()


@pytest.mark.parametrize("body", [{}, {"features": None}])
async def test_a_server_that_is_named_gets_calls_and_one_that_left_none(
    engines: list[ScriptedEngine], follower: tuple[EngineClient, Path], body: dict[str, Any]
) -> None:
    client, file = follower
    assert b"[7,8]" in await ask(client, "trace", **body)
    first, second = engines
    first.hold()
    running = asyncio.ensure_future(ask(client, "trace", **body))
    await first.wait_until(lambda engine: engine.running == 1)
    write_atomically(file, f"{second.base_url}\n".encode())
    assert client._replicas is not None
    async with asyncio.timeout(5), client._replicas._returned:
        await client._replicas._returned.wait_for(
            lambda: client._replicas and client._replicas.all[0].address == second.base_url
        )
    assert b"[7,8]" in await ask(client, "trace", **body)
    # It ends what it was asked before it left.
    first.release()
    assert b"[7,8]" in await running
    assert (len(first.calls), len(second.calls)) == (2, 1)


async def test_calls_of_a_server_that_left_and_ended_are_asked_elsewhere(
    engines: list[ScriptedEngine], follower: tuple[EngineClient, Path]
) -> None:
    client, file = follower
    first, second = engines
    first.hold()
    running = asyncio.ensure_future(ask(client, "trace"))
    await first.wait_until(lambda engine: engine.running == 1)
    write_atomically(file, b"")
    assert client._replicas is not None
    async with asyncio.timeout(5), client._replicas._returned:
        await client._replicas._returned.wait_for(
            lambda: client._replicas and not client._replicas.all
        )
    await first.close()
    write_atomically(file, f"{second.base_url}\n".encode())
    assert b"[7,8]" in await running


async def test_a_file_of_servers_that_is_missed_once_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "FOLLOW_SECONDS", 0.0)
    found = iter([None, ["http://a"], None])

    def read() -> list[str]:
        if (addresses := next(found, ["http://b"])) is None:
            raise OSError("stale file handle")
        return addresses

    async def name(address: str) -> str:
        return address

    async def is_there(_: str, __: bool) -> bool:
        return True

    replicas = Replicas([], is_there=is_there, read=read)
    async with asyncio.timeout(10):
        assert await replicas.ask("s", name) in ("http://a", "http://b")
        async with replicas._returned:
            await replicas._returned.wait_for(lambda: replicas.all[0].address == "http://b")
    await replicas.close()


async def test_one_that_takes_no_connection_is_lost_and_a_late_answer_is_a_timeout() -> None:
    replicas = known(2)
    home = replicas.choose("s")
    assert home is not None

    async def connect(address: str) -> str:
        if address == home.address:
            raise aiohttp.ConnectionTimeoutError
        return address

    async def late(_: str) -> str:
        raise TimeoutError

    assert await replicas.ask("s", connect) != home.address
    with pytest.raises(TimeoutError):
        await replicas.ask("s", late)
    assert [it.is_up for it in replicas.all if it is not home] == [True]
    await replicas.close()

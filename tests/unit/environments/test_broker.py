"""The broker of an environment: who gets a request, who gets the answer, and who is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from commands import wait_until_async

from gradus.environments import broker
from gradus.environments.broker import Broker
from gradus.environments.pool import SILENT_SECONDS, PoolSize

DEADLINE_SECONDS = 60.0


@dataclass
class Player:
    """A worker: its process, its death pipe and its socket in one."""

    pid: int
    socket: Any
    exitcode: int | None = None
    is_ended: bool = False
    is_stubborn: bool = False
    """Whether it ends only when it is killed."""
    is_killed: bool = False

    async def get(self) -> list[bytes]:
        """The next request that is not a question whether it lives: sender, id, method, payload."""
        while True:
            async with asyncio.timeout(DEADLINE_SECONDS):
                parts: list[bytes] = await self.socket.recv_multipart()
            if parts[1] != b"gradus_alive":
                return parts
            await self.say(parts[0], parts[1], b"reply", b"")

    async def say(self, *parts: bytes) -> None:
        await self.socket.send_multipart(list(parts))

    def terminate(self) -> None:
        self.is_ended = True

    def join(self, timeout: float) -> None:
        assert self.is_ended

    def is_alive(self) -> bool:
        return self.is_stubborn and not self.is_killed

    def kill(self) -> None:
        self.is_killed = self.is_ended = True

    def close(self) -> None:
        """As the death pipe."""


@dataclass
class Room:
    """A broker with its workers, and one client."""

    folder: Path
    now: float = 0.0
    players: list[Player] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    num_clients: int = 0

    def start(self, address: str) -> Any:
        assert Path(address.removeprefix("ipc://")).parent == self.folder
        socket = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        player = Player(100 + len(self.players), socket)
        self.players.append(player)
        return player, player

    async def ask(self, *parts: bytes) -> None:
        await self.client.send_multipart(list(parts))

    def connect(self) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        self.num_clients += 1
        socket.setsockopt(zmq.IDENTITY, b"client %d" % self.num_clients)
        socket.connect(f"ipc://{self.folder / 'run'}")
        return socket

    async def end_client(self) -> None:
        """The client ends, as if it was killed, and the broker knows it."""
        self.client.close()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await self.broker.is_there(b"client %d" % self.num_clients):
                await asyncio.sleep(0)

    async def replace_client(self) -> None:
        await self.end_client()
        self.client: Any = self.connect()

    async def answer(self) -> list[bytes]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            parts: list[bytes] = await self.client.recv_multipart()
        return parts

    @asynccontextmanager
    async def open(self, num_workers: int, **size: Any) -> AsyncIterator[None]:
        address = f"ipc://{self.folder / 'run'}"
        chosen = {"max_workers": num_workers, "elastic": False, "multiplex": 10, **size}
        pool = PoolSize(num_at_start=num_workers, max_tool_servers=1, **chosen)
        self.broker = Broker(
            address,
            pool,
            self.folder,
            start_worker=self.start,
            report=self.reports.append,
            clock=lambda: self.now,
        )
        serving = asyncio.create_task(self.broker.run())
        self.client = self.connect()
        try:
            await wait_until_async(lambda: len(self.players) == num_workers)
            yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for socket in (self.client, *(player.socket for player in self.players)):
                socket.close()
            self.context.term()
        assert all(player.is_ended for player in self.players)


async def test_requests_go_to_the_worker_with_the_fewest_and_answers_to_who_asked(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(2):
        for number in (b"1", b"2"):
            await room.ask(number, b"run", b"task")
        taken = [await player.get() for player in room.players]
        assert sorted(parts[1] for parts in taken) == [b"1", b"2"]
        for player, (sender, request, _, payload) in zip(room.players, taken, strict=True):
            await player.say(sender, request, b"delta", payload)
            await player.say(sender, request, b"reply", b"end of " + request)
        told = [await room.answer() for _ in range(4)]
        assert {tuple(parts) for parts in told} == {
            *((b"1", b"delta", b"task"), (b"1", b"reply", b"end of 1")),
            *((b"2", b"delta", b"task"), (b"2", b"reply", b"end of 2")),
        }


async def test_a_worker_that_answered_is_the_freest_again(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(2):
        for number in (b"1", b"2"):
            await room.ask(number, b"run", b"")
        _, (sender, request, *_) = [await player.get() for player in room.players]
        await room.players[1].say(sender, request, b"reply", b"")
        assert (await room.answer())[0] == request
        await room.ask(b"3", b"run", b"")
        assert (await room.players[1].get())[1] == b"3"


async def test_a_worker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(2):
        room.players[1].is_stubborn = True
    assert [player.is_killed for player in room.players] == [False, True]


@pytest.mark.shows("F54")
async def test_health_is_answered_and_malformed_requests_are_dropped(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        await room.ask(b"one part")
        await room.ask(b"\xff", b"run", b"")
        await room.ask(b"1", b"\xff", b"")
        await room.ask(b"", b"run", b"")
        await room.ask(b"1", b"health", b"\xc0")
        assert (await room.answer())[:2] == [b"1", b"reply"]
        await room.ask(b"2", b"run", b"")
        assert (await room.players[0].get())[1] == b"2", "the first that a worker is asked"


@pytest.mark.shows("F55")
async def test_f55_hundreds_of_clients_that_do_not_wait_do_no_harm(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        for _ in range(300):
            with room.context.socket(zmq.DEALER) as client:
                client.setsockopt(zmq.LINGER, 0)
                client.connect(f"ipc://{tmp_path / 'run'}")
                await client.send_multipart([b"1", b"health", b""])
        await room.ask(b"2", b"health", b"")
        assert (await room.answer())[:2] == [b"2", b"reply"]


async def test_a_cancellation_goes_to_the_worker_that_plays(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(2):
        await room.ask(b"1", b"run", b"")
        await room.ask(b"2", b"cancel", msgspec.msgpack.encode({"request_id": "9"}))
        answer = await room.answer()
        assert msgspec.msgpack.decode(answer[2])["cancelled"] is False
        await room.ask(b"3", b"cancel", b"no table")
        assert (await room.answer())[0] == b"3"
        await room.ask(b"4", b"cancel", msgspec.msgpack.encode({"request_id": "1"}))
        seen = [(await room.players[0].get())[1:3] for _ in range(2)]
        assert seen == [[b"1", b"run"], [b"4", b"cancel"]]


@pytest.mark.shows("F08")
async def test_a_silent_worker_gets_nothing_until_it_answers(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(2):
        deaf, awake = room.players
        sender, question, *_ = await deaf.socket.recv_multipart()
        assert question == b"gradus_alive"
        await wait_until_async(lambda: room.reports)
        room.now = broker.LOAD_SECONDS + 1.0
        answering = asyncio.create_task(awake.get())
        await wait_until_async(lambda: {"silent": [deaf.pid]} in room.reports)
        for number in (b"1", b"2", b"3"):
            await room.ask(number, b"run", b"")
        assert (await answering)[1] == b"1"
        assert [(await awake.get())[1] for _ in range(2)] == [b"2", b"3"]
        await deaf.say(sender, question, b"reply", b"")
        await wait_until_async(lambda: room.reports[-1] == {"silent": []})
        await room.ask(b"4", b"run", b"")
        assert (await deaf.get())[1] == b"4"


async def test_a_worker_that_answered_once_is_silent_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "ASK_SECONDS", 0.01)
    room = Room(tmp_path)
    async with room.open(1):
        (player,) = room.players
        sender, question, *_ = await player.socket.recv_multipart()
        await player.say(sender, question, b"reply", b"")
        await player.socket.recv_multipart()
        room.now = SILENT_SECONDS + 1.0
        await wait_until_async(lambda: {"silent": [player.pid]} in room.reports)


async def test_an_elastic_pool_with_room_grows_when_nobody_answers(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(1, max_workers=2, elastic=True):
        await room.players[0].socket.recv_multipart()
        room.now = broker.LOAD_SECONDS + 1.0
        await room.ask(b"1", b"run", b"")
        await wait_until_async(lambda: len(room.players) == 2)


async def test_an_elastic_pool_grows_when_it_is_full_or_silent(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(1, max_workers=3, elastic=True, multiplex=2):
        for number in (b"1", b"2"):
            await room.ask(number, b"run", b"")
        await wait_until_async(lambda: len(room.players) == 2)
        assert (await room.players[1].socket.recv_multipart())[1] == b"gradus_alive"
        room.now = broker.LOAD_SECONDS + 1.0
        await wait_until_async(lambda: {"silent": [100, 101]} in room.reports)
        for number in (b"3", b"4", b"5", b"6"):
            await room.ask(number, b"run", b"")
        await wait_until_async(lambda: len(room.players) == 3)
        assert (await room.players[2].get())[1] in {b"4", b"5"}
        assert {"num_workers": 3} in room.reports


async def test_the_first_worker_that_ends_while_it_loads_is_reported_with_its_cause(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        (tmp_path / "100.cause").write_text("MemoryError: no more")
        room.players[0].exitcode = 3
        text = "worker process 100 ended with exit code 3: MemoryError: no more"
        await wait_until_async(
            lambda: {"lost": text, "pid": 100, "is_replaced": False} in room.reports
        )
        await room.ask(b"1", b"run", b"")
        assert b"EnvironmentLost: no worker is left" in (await room.answer())[2]
        await room.ask(b"2", b"cancel", msgspec.msgpack.encode({"request_id": "1"}))
        assert msgspec.msgpack.decode((await room.answer())[2])["cancelled"] is False


@pytest.mark.shows("F06")
async def test_what_a_lost_worker_was_asked_is_answered_and_a_new_one_waits_for_its_turn(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(2):
        for player in room.players:  # both have loaded
            sender, question, *_ = await player.socket.recv_multipart()
            await player.say(sender, question, b"reply", b"")
        for number in (b"1", b"2"):
            await room.ask(number, b"run", b"")
        lost, other = room.players
        await lost.get()
        await room.ask(b"3", b"cancel", msgspec.msgpack.encode({"request_id": "1"}))
        await lost.get()
        lost.exitcode = 3
        answers = {(answer := await room.answer())[0]: answer[2] for _ in range(2)}
        assert b"EnvironmentLost: worker process 100 ended with exit code 3" in answers[b"1"]
        assert msgspec.msgpack.decode(answers[b"3"])["cancelled"] is False
        await room.ask(b"1", b"run", b"")
        assert [(await other.get())[1] for _ in range(2)] == [b"2", b"1"]
        assert len(room.players) == 3


@pytest.mark.shows("F05")
async def test_another_client_gets_the_episode_that_a_client_which_is_gone_asked_for(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        player = room.players[0]
        await room.ask(b"1", b"run", b"task")
        sender, request, *_ = await player.get()
        await player.say(sender, request, b"delta", b"turn 1")
        assert await room.answer() == [b"1", b"delta", b"turn 1"]
        await room.replace_client()
        await room.ask(b"a", b"run", b"task")
        assert await room.answer() == [b"a", b"delta", b"turn 1"]
        await player.say(sender, request, b"reply", b"end")
        assert await room.answer() == [b"a", b"reply", b"end"]
        await room.ask(b"b", b"run", b"another task")
        assert (await player.get())[1:] == [b"b", b"run", b"another task"], "task was played once"


async def test_what_ended_while_no_client_was_there_is_given_to_the_next_once(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        player = room.players[0]
        await room.ask(b"1", b"run", b"task")
        sender, request, *_ = await player.get()
        await room.end_client()
        await player.say(sender, request, b"delta", b"turn 1")
        await player.say(sender, request, b"reply", b"end")
        room.client = room.connect()
        for name in (b"a", b"b"):
            await room.ask(name, b"run", b"task")
        assert await room.answer() == [b"a", b"delta", b"turn 1"]
        assert await room.answer() == [b"a", b"reply", b"end"]
        assert (await player.get())[1] == b"b"


async def test_an_episode_that_changed_hands_is_cancelled_under_its_new_name(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        player = room.players[0]
        await room.ask(b"1", b"run", b"task")
        sender, *_ = await player.get()
        await room.replace_client()
        await room.ask(b"a", b"run", b"task")
        await room.ask(b"c", b"cancel", msgspec.msgpack.encode({"request_id": "a"}))
        _, request, method, payload = await player.get()
        assert (method, msgspec.msgpack.decode(payload)) == (b"cancel", {"request_id": "1"})
        await player.say(sender, request, b"reply", b"cancelled")
        assert await room.answer() == [b"c", b"reply", b"cancelled"]


@pytest.mark.shows("F05")
async def test_an_episode_that_nobody_asks_for_again_is_given_up(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        player = room.players[0]
        await room.ask(b"1", b"run", b"task")
        await player.get()
        await room.replace_client()
        await room.ask(b"a", b"run", b"another task")
        assert (await player.get())[1] == b"a"
        room.now += broker.ORPHANED_SECONDS + 1
        _, _, method, payload = await player.get()
        assert (method, msgspec.msgpack.decode(payload)) == (b"cancel", {"request_id": "1"})


async def test_the_same_task_asked_for_twice_by_a_client_that_lives_is_played_twice(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    async with room.open(1):
        await room.ask(b"1", b"run", b"task")
        await room.ask(b"2", b"run", b"task")
        with room.connect() as other:
            await other.send_multipart([b"3", b"run", b"task"])
            asked = {(await room.players[0].get())[1] for _ in range(3)}
        assert asked == {b"1", b"2", b"3"}, "in whatever order two sockets are read"

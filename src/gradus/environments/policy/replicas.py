"""Which replica of the policy a worker asks, and what becomes of its calls when one is lost.

    up     asked
    lost   its connection ended, it refused to answer for an older version or because it was not
           told yet which one it serves, or it was silent;
           left out until it answers again, and its calls are asked again elsewhere

The calls of a session stay at one replica, whose prefix cache holds what was said before. Which one
is decided by the highest hash of session and address among those that are up (rendezvous hashing):
all workers agree without talking, and a replica that comes or goes moves no session but its own.
A new session passes by a replica that has more than its share of this worker's calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp

from gradus.log import get_logger

MOST_OF_MEAN = 1.25
"""A new session goes to no replica that has more than this share of the mean in flight."""
MAX_LOSSES = 3
"""So many replicas are lost under one call before it fails: it may be what ends them."""
REMEMBERED_SESSIONS = 65_536
WATCH_SECONDS = 5.0
"""Between two looks whether replicas with calls in flight are there."""
FOLLOW_SECONDS = 1.0
"""Between two looks which replicas there are, where that changes."""
CHECK_SECONDS = 10.0
"""How long one may take to answer such a look; after the second that it misses, it is lost."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.25, 5.0
"""Before a lost replica is looked at again, doubled each time."""
GATE_SECONDS = 900.0
"""How long a call waits for a replica while all are lost; an episode has a deadline of its own."""

T = TypeVar("T")
log = get_logger(__name__)


class EngineStale(ConnectionError):
    """The engine answers nobody yet; it opens once it was told which version it serves."""


class OlderVersion(ConnectionError):
    """A replica serves an older version than the caller may be answered from."""


@dataclass(eq=False)
class Replica:
    """One inference server, as one worker knows it."""

    address: str
    in_flight: int = 0
    """Calls of this worker that it has not answered."""
    is_up: bool = True
    limits: set[asyncio.Timeout] = field(default_factory=set)
    """Of these calls; they expire when the replica is lost."""


class Replicas:
    """Owns what a worker knows of the replicas, and sends each call to one."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        is_there: Callable[[str, bool], Awaitable[bool]],
        read: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`is_there` asks the server at an address whether it answers, and where the second
        argument is true whether it knows what it serves, for which its engine must have time;
        `read` says the addresses where they change."""
        self.all = [Replica(address) for address in addresses]
        self._is_there = is_there
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._returned = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._read = read

    async def ask(
        self,
        session_id: str | None,
        call: Callable[[str], Awaitable[T]],
        *,
        may_ask_again: Callable[[], bool] = lambda: True,
    ) -> T:
        """The answer of one replica to `call`, which gets its address.

        A call whose replica is lost is made again, at another, where `may_ask_again` says so.
        TimeoutError when none came back in time; what else `call` raises is its own.
        """
        if self._watch is None:
            self._watch = self._start(self._watch_calls())
            if self._read is not None:
                self._start(self._follow(self._read))
        lost = 0
        while True:
            replica = self.choose(session_id) or await self._wait_for_one(session_id)
            try:
                return await self._ask(replica, call)
            except (OlderVersion, EngineStale) as error:
                self.lose(replica, str(error))
            except (OSError, aiohttp.ClientError) as error:
                if is_late(error):
                    raise
                self.lose(replica, str(error) or repr(error))
                lost += 1
                if lost == MAX_LOSSES or not may_ask_again():
                    raise

    def choose(self, session_id: str | None) -> Replica | None:
        """The replica of a session, from now on; None while all are lost."""
        up = [replica for replica in self.all if replica.is_up]
        if not up:
            return None
        if session_id is None:
            return min(up, key=lambda replica: replica.in_flight)
        kept = self._sessions.pop(session_id, None)
        if kept is None or not kept.is_up:
            total = sum(replica.in_flight for replica in up)
            most = math.ceil(MOST_OF_MEAN * (total + 1) / len(up))
            # One always has room: together they have less than `most` each.
            room = [replica for replica in up if replica.in_flight < most]
            kept = max(room, key=lambda replica: _rank(session_id, replica.address))
        self._sessions[session_id] = kept
        if len(self._sessions) > REMEMBERED_SESSIONS:
            self._sessions.popitem(last=False)
        return kept

    def lose(self, replica: Replica, reason: str) -> None:
        """Leave a replica out until it answers again, and move its calls."""
        if not replica.is_up:
            return
        replica.is_up = False
        log.warning("the replica at %s is left out: %s", replica.address, reason)
        self._drop(replica)
        self._start(self._bring_back(replica))

    def _drop(self, replica: Replica) -> None:
        """Let its calls be asked again elsewhere."""
        now = asyncio.get_running_loop().time()
        limits, replica.limits = replica.limits, set()
        for limit in limits:
            limit.reschedule(now)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, replica: Replica, call: Callable[[str], Awaitable[T]]) -> T:
        replica.in_flight += 1
        limit = asyncio.timeout(None)
        try:
            async with limit:
                replica.limits.add(limit)
                return await call(replica.address)
        except TimeoutError as error:
            # The caller's own deadline is another matter.
            if not limit.expired():
                raise
            raise ConnectionResetError(f"{replica.address} was lost before it answered") from error
        finally:
            replica.limits.discard(limit)
            replica.in_flight -= 1

    async def _wait_for_one(self, session_id: str | None) -> Replica:
        async with asyncio.timeout(GATE_SECONDS), self._returned:
            while (replica := self.choose(session_id)) is None:
                await self._returned.wait()
            return replica

    async def _watch_calls(self) -> None:
        """Lose the replicas that hold calls and are silent, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await asyncio.gather(*(self._look_at(it) for it in self.all if it.in_flight))

    async def _look_at(self, replica: Replica) -> None:
        # Twice: after a while in which this process itself stood still, the first look is too late.
        if not await self._answers(replica) and not await self._answers(replica):
            self.lose(replica, f"it was silent for {2 * CHECK_SECONDS:g} s")

    async def _follow(self, read: Callable[[], Sequence[str]]) -> None:
        while True:
            # On a disk that machines share, a file that was just replaced may be missed once.
            with contextlib.suppress(OSError):
                self._take(read())
                async with self._returned:
                    self._returned.notify_all()
            await asyncio.sleep(FOLLOW_SECONDS)

    def _take(self, addresses: Sequence[str]) -> None:
        """Ask these from now on. One that left finishes what it was asked while it answers."""
        known = {replica.address: replica for replica in self.all}
        self.all += [Replica(address) for address in addresses if address not in known]
        for address in known.keys() - set(addresses):
            self.all.remove(known[address])
            known[address].is_up = False
            self._start(self._drain(known[address]))

    async def _drain(self, replica: Replica) -> None:
        while replica.in_flight:
            await asyncio.sleep(WATCH_SECONDS)
            if replica.in_flight and not await self._answers(replica):
                self._drop(replica)

    async def _bring_back(self, replica: Replica) -> None:
        delay = FIRST_DELAY_SECONDS
        is_back = False
        while not is_back:
            await asyncio.sleep(delay)
            is_back = await self._answers(replica, is_settled=True)
            if replica not in self.all:
                return
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        log.info("the replica at %s is asked again", replica.address)
        replica.is_up = True
        async with self._returned:
            self._returned.notify_all()

    async def _answers(self, replica: Replica, *, is_settled: bool = False) -> bool:
        with contextlib.suppress(OSError, aiohttp.ClientError):
            async with asyncio.timeout(CHECK_SECONDS):
                return await self._is_there(replica.address, is_settled)
        return False

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def is_late(error: Exception) -> bool:
    """Whether an answer took longer than its caller waits, of a server that took the call."""
    is_timeout = isinstance(error, TimeoutError)
    return is_timeout and not isinstance(error, aiohttp.ConnectionTimeoutError)


def _rank(session_id: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session_id} {address}".encode(), digest_size=8).digest()

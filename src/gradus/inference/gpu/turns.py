"""Engine and trainer take turns on one GPU: the engine sleeps while the trainer learns.

    trainer                       this server                      orchestrator
    sleep(v) ──────────────────▶  waits until v is served  ◀────── apply(v)
                                  freezes requests, leaves the GPU
    ◀──────────────── asleep
    learns version v + 1          no version changes; new requests wait
    copies it to main memory
    frees its own on the GPU
    wake(v) ───────────────────▶  takes its memory back, continues with v
    ◀───────────────── awake
    writes v + 1, announces it    ◀──────────────────────────────── apply(v + 1)

vLLM sleeps at level 1: the weights go to main memory, the KV cache is given up, and running
requests keep their tokens; what they had in the cache is computed again afterwards. Level 2 would
drop the weights too, but an evaluation may need the old version for long after the trainer is done,
and a trainer that dies must leave an engine that can answer. For the same reason the engine wakes
by itself when its time is over. vLLM has not done it on a GPU yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gradus.inference.admin import WeightAdmin, json_response, refused
from gradus.log import get_logger
from gradus.wire.inference import ApplyRefusal, TurnRequest, TurnResult, decode_request

logger = get_logger(__name__)


class SleepControl(Protocol):
    """What taking turns needs of the engine."""

    async def sleep(self) -> None:
        """Freeze running requests and give up the GPU's memory; weights are kept elsewhere."""

    async def wake(self) -> None:
        """Take the memory back and continue with frozen and new requests."""


class EngineTurns:
    """Owns whose turn it is. While the engine sleeps it holds what a change of weights needs, so
    that no version is loaded into memory that is not there.

    A sleep or a wake that fails leaves an engine in an unknown state: `on_broken` must end the
    server, and with it the run.
    """

    def __init__(
        self,
        engine: SleepControl,
        admin: WeightAdmin,
        *,
        on_broken: Callable[[str], None],
        deadline_seconds: float = 300.0,
    ) -> None:
        self._engine = engine
        self._admin = admin
        self._on_broken = on_broken
        self._deadline_seconds = deadline_seconds
        self._asleep_since: float | None = None
        self._asleep_for: TurnRequest | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        """One request at a time; a wake that comes while the engine falls asleep waits for it."""

    async def sleep(self, request: TurnRequest) -> TurnResult:
        """Put the engine to sleep once the version of the request is served.

        ApplyRefusal: 409 wrong run, stale term, or it sleeps already; 504 the version was not
        served in time; 500 the engine failed.
        """
        return await asyncio.shield(asyncio.ensure_future(self._sleep(request)))

    async def wake(self, request: TurnRequest) -> TurnResult:
        """Wake the engine; one that is awake stays so, and the answer says it."""
        return await asyncio.shield(asyncio.ensure_future(self._wake(request)))

    async def _sleep(self, request: TurnRequest) -> TurnResult:
        async with self._asking:
            self._admin.served.check_owner(request)
            if self._asleep_since is not None and request == self._asleep_for:
                return TurnResult(0.0)  # its first answer was lost on the way
            if self._asleep_since is not None:
                raise ApplyRefusal(409, "the engine sleeps already; a trainer asks once for a step")
            began = time.monotonic()
            await self._hold(request)
            self._admin.is_paused = True
            await self._do("go to sleep", self._engine.sleep)
            self._asleep_since, self._asleep_for = time.monotonic(), request
            self._alarm = asyncio.create_task(self._wake_late(request.sleep_seconds))
            return TurnResult(self._asleep_since - began)

    async def _wake(self, request: TurnRequest) -> TurnResult:
        async with self._asking:
            self._admin.served.check_owner(request)
            if self._asleep_since is None:
                return TurnResult(0.0, was_in_time=False)
            if self._alarm is not None:
                self._alarm.cancel()
            return TurnResult(await self._rise())

    async def _wake_late(self, sleep_seconds: float) -> None:
        await asyncio.sleep(sleep_seconds)
        async with self._asking:
            # From here on it must not be cancelled half-way.
            self._alarm = None
            if self._asleep_since is None:
                return
            logger.error(
                "the trainer did not give the GPU back in %g s: the engine wakes by itself",
                sleep_seconds,
            )
            await self._rise()

    async def _rise(self) -> float:
        """Wake the engine and let versions change again; seconds that it slept."""
        assert self._asleep_since is not None
        slept = time.monotonic() - self._asleep_since
        self._asleep_since = None
        await self._do("wake up", self._engine.wake)
        self._admin.is_paused = False
        self._admin.changed.release()
        return slept

    async def _hold(self, request: TurnRequest) -> None:
        """Return once the version is served; no other can be applied from then on."""
        changed = self._admin.changed
        try:
            async with asyncio.timeout(request.wait_seconds):
                await changed.acquire()
                try:
                    await changed.wait_for(lambda: self._admin.served.version >= request.version)
                except BaseException:
                    changed.release()
                    raise
        except TimeoutError as error:
            raise ApplyRefusal(
                504,
                f"version {request.version} was not served in {request.wait_seconds:g} s, only "
                f"{self._admin.served.version}; the engine stays awake",
            ) from error

    async def _do(self, what: str, action: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._deadline_seconds):
                await action()
        except Exception as error:
            self._admin.changed.release()
            reason = f"the engine could not {what}: {error!r}"
            logger.error("%s; the server ends", reason)
            self._on_broken(reason)
            raise ApplyRefusal(500, reason) from error


class TurnRoutes:
    """Answers `/gradus/sleep` and `/gradus/wake`; the guard has checked who asks."""

    def __init__(self, turns: EngineTurns) -> None:
        self._turns = turns

    def add_to(self, app: FastAPI) -> None:
        app.add_route("/gradus/sleep", self.sleep, methods=["POST"])
        app.add_route("/gradus/wake", self.wake, methods=["POST"])

    async def sleep(self, request: Request) -> Response:
        try:
            asked = decode_request(await request.body(), TurnRequest)
            return json_response(await self._turns.sleep(asked))
        except ApplyRefusal as refusal:
            return refused(refusal)

    async def wake(self, request: Request) -> Response:
        try:
            asked = decode_request(await request.body(), TurnRequest)
            return json_response(await self._turns.wake(asked))
        except ApplyRefusal as refusal:
            return refused(refusal)

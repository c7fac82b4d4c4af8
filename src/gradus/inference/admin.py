"""Changing the served weights under running requests: verify, pause, load, set version, resume.

The routes that gradus adds to vLLM's server ask for it. Last page of the reading path.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gradus.errors import CorruptStateError
from gradus.log import get_logger
from gradus.wire.inference import (
    ApplyRefusal,
    ApplyRequest,
    ApplyResult,
    EngineStatus,
    ServedPolicy,
    check_weights_directory,
    decode_request,
)

logger = get_logger(__name__)


class EngineControl(Protocol):
    """What a weight change needs of the engine."""

    async def pause(self) -> None:
        """Stop scheduling; running requests keep their place and their KV cache."""

    async def resume(self) -> None:
        """Schedule again; does nothing when not paused."""

    async def load(self, directory: Path) -> None:
        """Replace every parameter by the tensors in `directory`."""

    async def set_version(self, version: int) -> None:
        """Make the engine report `version`."""

    async def get_version(self) -> int:
        """The version that the engine reports."""


Verify = Callable[[Path, str], object]
"""Raises CorruptStateError unless a directory holds whole, loadable weights of that digest."""


@dataclass
class _Clock:
    """Seconds spent in each phase of one change."""

    pause: float = 0.0
    load: float = 0.0
    resume: float = 0.0


class WeightAdmin:
    """Owns which weights are served; changes them one at a time.

    A change is one call with a deadline inside the server, and the engine is resumed after it, so a
    caller that dies leaves nothing paused. A change that fails while loading loads the weights
    served before again. If that fails too, the engine holds an unknown mixture: it stays paused,
    and `on_broken` is called, which must end the server.
    """

    def __init__(
        self,
        engine: EngineControl,
        *,
        served: ServedPolicy,
        initial_weights: Path | None,
        weights_root: Path,
        verify: Verify,
        on_broken: Callable[[str], None],
        deadline_seconds: float = 300.0,
    ) -> None:
        self.served = served
        self.is_paused = False
        self.is_broken = False
        """Whether it is unknown what the engine would serve."""
        self._engine = engine
        self._directory = initial_weights
        self._verified: tuple[Path, str] | None = None
        """Directory and digest of weights that were checked and will be served."""
        self._weights_root = weights_root
        self._verify = verify
        self._on_broken = on_broken
        self._deadline_seconds = deadline_seconds
        self.changed = asyncio.Condition()  # whoever holds it may change weights, or keeps them

    async def apply(self, request: ApplyRequest) -> ApplyResult:
        """Serve the weights that `request` names, and tell what the engine says it serves.

        A server that was stale answers requests from then on.

        ApplyRefusal, and the version served before stays: 409 wrong run, stale term or older
        version; 403 outside the run's weights; 422 digest mismatch; 500 the engine failed.
        The caller going away does not stop a change that has begun.
        """
        return await asyncio.shield(asyncio.ensure_future(self._apply(request)))

    async def _apply(self, request: ApplyRequest) -> ApplyResult:
        async with self.changed:
            self.served.check(request)
            directory = self._weights_root
            if not request.is_initial:
                directory = check_weights_directory(request.directory, self._weights_root)
            if self.served.is_current(request):
                self.served = self.served.after(request)
                return ApplyResult(await self._engine.get_version(), 0.0, 0.0, 0.0)
            if self._verified != (directory, request.digest):
                await self._check_weights(directory, request)
            if request.only_verifies:
                self._verified = directory, request.digest
                return ApplyResult(self.served.version, 0.0, 0.0, 0.0)
            self._verified = None
            clock = _Clock()
            await self._change(directory, request, clock)
            self.served = self.served.after(request)
            self._directory = directory
            self.changed.notify_all()
            logger.info(
                "serves version %d (paused %.3f s, loaded in %.3f s)",
                request.version,
                clock.pause + clock.load + clock.resume,
                clock.load,
            )
            return ApplyResult(request.version, clock.pause, clock.load, clock.resume)

    async def _check_weights(self, directory: Path, request: ApplyRequest) -> None:
        """Read and check every byte before anything stops, on a thread."""
        try:
            await asyncio.to_thread(self._verify, directory, request.digest)
        except CorruptStateError as error:
            raise ApplyRefusal(422, f"weights of version {request.version}: {error}") from error

    async def _change(self, directory: Path, request: ApplyRequest, clock: _Clock) -> None:
        try:
            async with asyncio.timeout(self._deadline_seconds):
                await self._pause(clock)
                await self._load(directory, request.version, clock)
        except TimeoutError as error:
            self._break(f"version {request.version}: no answer in {self._deadline_seconds:g} s")
            raise ApplyRefusal(500, "the engine did not apply the weights in time") from error
        finally:
            if not self.is_broken:
                await self._resume(clock)

    async def _pause(self, clock: _Clock) -> None:
        began = time.monotonic()
        self.is_paused = True
        try:
            # Running requests freeze where they are, with their tokens and their KV cache.
            await self._engine.pause()
        except Exception as error:
            raise ApplyRefusal(500, f"the engine could not be paused: {error}") from error
        clock.pause = time.monotonic() - began

    async def _load(self, directory: Path, version: int, clock: _Clock) -> None:
        began = time.monotonic()
        try:
            await self._engine.load(directory)
            await self._engine.set_version(version)
            reported = await self._engine.get_version()
        except Exception as error:
            await self._restore(error)
            raise ApplyRefusal(500, f"version {version} could not be loaded: {error}") from error
        clock.load = time.monotonic() - began
        if reported != version:
            self._break(f"the engine reports version {reported} after loading {version}")
            raise ApplyRefusal(500, f"the engine reports version {reported}, not {version}")

    async def _resume(self, clock: _Clock) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_seconds):
                await self._engine.resume()
        except Exception as error:
            self._break(f"the engine could not be resumed: {error!r}")
            raise ApplyRefusal(500, "the engine could not be resumed") from error
        self.is_paused = False
        clock.resume = time.monotonic() - began

    async def _restore(self, cause: Exception) -> None:
        """Load the weights served before; a half-loaded policy must never answer."""
        logger.warning("putting version %d back: %s", self.served.version, cause)
        if self._directory is None:
            self._break("the initial weights are not on disk to be put back")
            return
        try:
            await self._engine.load(self._directory)
            await self._engine.set_version(self.served.version)
        except Exception as error:
            self._break(f"version {self.served.version} cannot be put back: {error}")

    def _break(self, reason: str) -> None:
        self.is_broken = True
        logger.error("the engine's weights are unknown, the server ends: %s", reason)
        self._on_broken(reason)


class Counters(Protocol):
    """Load and counters of the engine."""

    def status(self, *, version: int, term: int, is_paused: bool) -> EngineStatus:
        """Load and counters, with the version that is served."""


class AskedEngine(Protocol):
    """What the routes ask of the engine's own process."""

    async def get_weight_version(self) -> str:
        """The version that it reports."""

    async def collective_rpc(self, method: str) -> list[Any]:
        """Every worker's answer to one call."""


class PolicyRoutes:
    """Answers `/gradus/...`; the guard has checked who asks."""

    def __init__(
        self,
        engine: AskedEngine,
        admin: WeightAdmin,
        counters: Counters,
        model: str = "",
        text_digests: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._admin = admin
        self._counters = counters
        self._model = model
        self._text_digests = dict(text_digests or {})
        self._incarnation = secrets.token_hex(8)

    def add_to(self, app: FastAPI) -> None:
        app.add_route("/gradus/apply", self.apply, methods=["POST"])
        app.add_route("/gradus/status", self.status, methods=["GET"])
        app.add_route("/gradus/weights", self.weights, methods=["GET"])

    async def apply(self, request: Request) -> Response:
        try:
            result = await self._admin.apply(decode_request(await request.body(), ApplyRequest))
        except ApplyRefusal as refusal:
            return refused(refusal)
        return json_response(result)

    async def status(self, _: Request) -> Response:
        """The version, asked from the engine's process; its load and counters."""
        version = int(await self._engine.get_weight_version())
        served = self._admin.served
        status = self._counters.status(
            version=version, term=served.term, is_paused=self._admin.is_paused
        )
        return json_response(
            msgspec.structs.replace(
                status,
                run_id=served.run_id,
                model=self._model,
                text_digests=self._text_digests,
                incarnation=self._incarnation,
                is_stale=served.is_stale,
            )
        )

    async def weights(self, _: Request) -> Response:
        """Digest of every served tensor, one object per worker, and the version they belong to."""
        if self._admin.is_paused:  # half a version, or an engine that sleeps without its memory
            return refused(ApplyRefusal(409, "the weights are changing or asleep; ask again later"))
        workers = await self._engine.collective_rpc("gradus_served_tensors")
        version = int(await self._engine.get_weight_version())
        return json_response({"version": version, "workers": workers})


def refused(refusal: ApplyRefusal) -> Response:
    return Response(refusal.body(), refusal.status, media_type="application/json")


def json_response(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

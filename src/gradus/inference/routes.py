"""The routes that gradus adds to vLLM's server: apply a version, status, served weights."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from gradus.inference.admin import WeightAdmin
from gradus.wire.inference import ApplyRefusal, EngineStatus, decode_apply_request


class Counters(Protocol):
    """Load and counters of the engine."""

    def status(self, *, version: int, term: int, is_paused: bool) -> EngineStatus:
        """Them, together with what is served."""
        ...


class AskedEngine(Protocol):
    """What the routes ask of the engine's own process."""

    async def get_weight_version(self) -> str:
        """The version that it reports."""
        ...

    async def collective_rpc(self, method: str) -> list[Any]:
        """Every worker's answer to one call."""
        ...


class PolicyRoutes:
    """Answers `/gradus/...`; who may ask is the guard's business."""

    def __init__(self, engine: AskedEngine, admin: WeightAdmin, counters: Counters) -> None:
        self._engine = engine
        self._admin = admin
        self._counters = counters

    def add_to(self, app: FastAPI) -> None:
        """Register the routes beside those of vLLM."""
        app.add_route("/gradus/apply", self.apply, methods=["POST"])
        app.add_route("/gradus/status", self.status, methods=["GET"])
        app.add_route("/gradus/weights", self.weights, methods=["GET"])

    async def apply(self, request: Request) -> Response:
        """Serve another published version; see `WeightAdmin.apply`."""
        try:
            result = await self._admin.apply(decode_apply_request(await request.body()))
        except ApplyRefusal as refusal:
            error = {"message": refusal.message, "code": refusal.status}
            return _json({"error": error}, status=refusal.status)
        return _json(result)

    async def status(self, _: Request) -> Response:
        """The version, asked from the engine's process; its load and counters."""
        version = int(await self._engine.get_weight_version())
        term, is_paused = self._admin.served.term, self._admin.is_paused
        return _json(self._counters.status(version=version, term=term, is_paused=is_paused))

    async def weights(self, _: Request) -> Response:
        """Digest of every served tensor, one object per worker, and the version they belong to."""
        workers = await self._engine.collective_rpc("gradus_served_tensors")
        version = int(await self._engine.get_weight_version())
        return _json({"version": version, "workers": workers})


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

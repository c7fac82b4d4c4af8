"""Containers that are started before their episode: a worker keeps some of the last image ready."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from verifiers.v1.runtimes.docker import DockerRuntime

from gradus.environments.containers import is_running
from gradus.environments.verifiers.patch import wrap
from gradus.log import get_logger

Begin = Callable[[Any], Awaitable[None]]
"""verifiers' start of a container."""
_TAKEN = ("_container", "_image_env", "_service_url", "_proxy")
"""What a runtime knows of the container that it started."""

log = get_logger(__name__)


class SpareContainers:
    """Owns started containers that no episode has used; each is given away once, and none returns.

    All are alike: of the engine, image, limits, network and variables that were asked for last.
    They bear the label of their worker's process, so that they go with its other containers.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kind = ""
        self._ready: deque[Any] = deque()
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, begin: Begin, runtime: Any) -> None:
        """Give the runtime a container: a ready one, or where there is none, one of its own."""
        kind = kind_of(runtime)
        if kind != self._kind:
            self._kind, unfit = kind, list(self._ready)
            self._ready.clear()
            for spare in unfit:
                self._work(spare.stop())
        spare = await self._next()
        if spare is None:
            await begin(runtime)
        else:
            for name in _TAKEN:
                setattr(runtime, name, getattr(spare, name))
            runtime.info.id = spare.info.id
        while len(self._ready) + len(self._starting) < self._size:
            self._work(self._prepare(begin, runtime, kind))

    async def _next(self) -> Any:
        """A container that runs, which is nobody's any more; None where none is ready."""
        while self._ready:
            spare = self._ready.popleft()
            if await is_running(spare.engine, spare._container):
                return spare
            log.warning("container %s ended before an episode got it", spare._container)
            self._work(spare.stop())
        return None

    async def _prepare(self, begin: Begin, like: Any, kind: str) -> None:
        spare = type(like)(like.config)
        spare.env = dict(like.env)
        try:
            await begin(spare)
        except Exception as error:  # an episode that starts its own will say so
            log.warning("no container could be started ahead: %s", error)
            await spare.stop()
            return
        if kind == self._kind:
            self._ready.append(spare)
        else:
            await spare.stop()

    def _work(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)


def kind_of(runtime: Any) -> str:
    """What two runtimes share whose containers may stand for one another."""
    return json.dumps([runtime.engine, runtime.config.model_dump(mode="json"), runtime.env])


def keep_spare_containers(size: int) -> None:
    """Keep so many containers ready in this worker; with 0, verifiers starts each as it is."""
    if not size:
        return
    spares = SpareContainers(size)

    def ahead(begin: Begin) -> Any:
        async def start(runtime: Any) -> None:
            await (begin(runtime) if runtime._host else spares.start(begin, runtime))

        return start

    wrap(DockerRuntime, "start", ahead)

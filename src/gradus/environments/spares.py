"""Containers that are started before their episode: a worker keeps some of the last kinds ready."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from verifiers.v1.runtimes.docker import DockerRuntime

from gradus.environments.containers import is_running
from gradus.environments.verifiers.patch import wrap
from gradus.log import get_logger

Begin = Callable[[Any], Awaitable[None]]
"""verifiers' start of a container."""
MAX_KINDS = 4
"""Kinds of which containers are kept; agents, judges and tool servers of a source are often two."""
_TAKEN = ("_container", "_image_env", "_service_url", "_proxy")
"""What a runtime knows of the container that it started."""

log = get_logger(__name__)


@dataclass(eq=False)
class _Kind:
    """Containers of one engine, image, limits, network and variables."""

    ready: deque[Any] = field(default_factory=deque)
    starting: int = 0


class SpareContainers:
    """Owns started containers that no episode has used; each is given away once, and none returns.

    There are `size` of each of the kinds that were asked for last, and an episode gets one of its
    own kind. They bear the label of their worker's process, so that they go with its others.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kinds: dict[str, _Kind] = {}  # that asked for last is the last
        self._has_warned = False
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, begin: Begin, runtime: Any) -> None:
        """Give the runtime a container: a ready one, or where there is none, one of its own."""
        name = kind_of(runtime)
        kind = self._kinds.pop(name, None)
        # Where each episode has an image of its own, what was started ahead would serve nobody.
        is_wanted = kind is not None or len(self._kinds) < MAX_KINDS
        kind = self._kinds[name] = kind or _Kind()
        if not is_wanted:
            self._forget_oldest()
        spare = await self._next(kind)
        if spare is None:
            await begin(runtime)
        else:
            for attribute in _TAKEN:
                setattr(runtime, attribute, getattr(spare, attribute))
            runtime.info.id = spare.info.id
        while is_wanted and self._misses(name, kind):
            kind.starting += 1
            self._work(self._prepare(begin, runtime, name, kind))

    def _misses(self, name: str, kind: _Kind) -> bool:
        is_kept = self._kinds.get(name) is kind
        return is_kept and len(kind.ready) + kind.starting < self._size

    def _forget_oldest(self) -> None:
        unfit = self._kinds.pop(next(iter(self._kinds))).ready
        while unfit:  # an episode that still looks for one of this kind finds none
            self._work(unfit.popleft().stop())
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "episodes ask for more than %d kinds of container: of a further one, some are "
                "started ahead only when it is asked for again",
                MAX_KINDS,
            )

    async def _next(self, kind: _Kind) -> Any:
        """A container that runs, which is nobody's any more; None where none is ready."""
        while kind.ready:
            spare = kind.ready.popleft()
            try:
                if await is_running(spare.engine, spare._container):
                    return spare
            except BaseException:  # the episode is cancelled, and nobody else knows this one
                self._work(spare.stop())
                raise
            log.warning("container %s ended before an episode got it", spare._container)
            self._work(spare.stop())
        return None

    async def _prepare(self, begin: Begin, like: Any, name: str, kind: _Kind) -> None:
        spare = type(like)(like.config)
        spare.env = dict(like.env)
        try:
            await begin(spare)
        except Exception as error:  # an episode that starts its own will say so
            log.warning("no container could be started ahead: %s", error)
            await spare.stop()
            return
        finally:
            kind.starting -= 1
        if self._kinds.get(name) is kind:
            kind.ready.append(spare)
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
    """Keep so many containers of a kind ready here; with 0, verifiers starts each as it is."""
    if not size:
        return
    spares = SpareContainers(size)

    def ahead(begin: Begin) -> Any:
        async def start(runtime: Any) -> None:
            await (begin(runtime) if runtime._host else spares.start(begin, runtime))

        return start

    wrap(DockerRuntime, "start", ahead)

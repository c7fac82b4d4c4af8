"""An environment whose process may be started anew: its episodes fail as lost, the rest waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from verifiers.v1.episode import WireEpisode

from gradus.errors import EnvironmentFailure, ProcessError
from gradus.log import get_logger
from gradus.orchestrator.environment import ConnectionLost, EnvironmentAddress, EnvironmentClient
from gradus.orchestrator.task_client import Task, TaskSetInfo

LOOK_SECONDS = 0.2
"""Between two looks for the ready file of the new process."""

log = get_logger(__name__)


class RestartedEnvironment:
    """Owns the client of the process that lives now, and waits for the next one when it ends.

    Running episodes fail as "EnvironmentLost", which the error policy plays again by default; what
    is asked for meanwhile waits. The launcher decides how often a process is started anew.

    >>> environment = RestartedEnvironment("words", find, connect, seconds=60)  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], EnvironmentAddress],
        connect: Callable[[EnvironmentAddress], EnvironmentClient],
        *,
        seconds: float,
    ) -> None:
        """`find` reads where the process listens, ProcessError while none does; `seconds` is how
        long a new process may take."""
        self._name = name
        self._find = find
        self._connect = connect
        self._seconds = seconds
        self._address = find()
        self._client = connect(self._address)
        self._info: TaskSetInfo | None = None
        self._connected = asyncio.Event()
        self._connected.set()

    async def info(self) -> TaskSetInfo:
        """How many tasks there are; the same after every restart."""
        self._info = await self._client.info()
        return self._info

    async def task(self, index: int) -> Task:
        """One task, from whichever process lives."""
        while True:
            await self._connected.wait()
            try:
                return await self._client.task(index)
            except ConnectionLost:
                continue

    async def run(self, task: Task, *, version: int, seed: int | None = None) -> WireEpisode:
        """Play one episode, once a process lives."""
        await self._connected.wait()
        return await self._client.run(task, version=version, seed=seed)

    async def watch(self) -> None:
        """Never returns; EnvironmentFailure when no new process comes, or it has other tasks.

        waits for: the end of the process      unblocked by: the kernel, time
        """
        while True:
            reason = "ended"
            try:
                await self._client.watch()
            except* EnvironmentFailure as failures:
                reason = str(failures.exceptions[0])
            await self._replace(reason)

    async def close(self) -> None:
        """Close the present connections."""
        await self._client.close()

    async def _replace(self, reason: str) -> None:
        self._connected.clear()
        log.warning("%s; waiting for a new process of %r", reason, self._name)
        lost = self._client
        lost.lose(reason)
        self._address = await self._next_address(reason)
        self._client = self._connect(self._address)
        await lost.close()
        info = await self._client.info()
        if self._info is not None and info != self._info:
            raise EnvironmentFailure(
                f"environment {self._name!r} came back with other tasks: {info}, before "
                f"{self._info}; its data changed while the run went on"
            )
        log.info("environment %r plays again (pid %s)", self._name, self._address.pid)
        self._connected.set()

    async def _next_address(self, reason: str) -> EnvironmentAddress:
        try:
            async with asyncio.timeout(self._seconds):
                while (address := self._look()) is None:
                    await asyncio.sleep(LOOK_SECONDS)
                return address
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"{reason}; no new process was ready in {self._seconds:g} s"
            ) from error

    def _look(self) -> EnvironmentAddress | None:
        try:
            address = self._find()
        except ProcessError:
            return None
        return None if address == self._address else address

"""verifiers' worker pool, which gives no episode to a worker that does not answer.

verifiers sends each request to the worker with the fewest, and never looks whether it lives: one
whose event loop is blocked, or that is stopped, goes on getting episodes and keeps them all. Here
the broker asks every worker once a second, and one that owes an answer for too long looks busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from verifiers.v1.serve import pool

from gradus.environments.pool import SILENT_SECONDS

ASK_SECONDS = 1.0
"""Between two questions to a worker that answered."""
START_SECONDS = 300.0
"""How long a new worker may take to load its environment."""
_BUSY = 1_000_000
_QUESTION = [b"gradus_alive", b"health", b"\xc0"]


class WatchedWorker(dict[str, Any]):
    """The pool's entry of one worker; `active` is beyond measure while the worker is silent."""

    def __init__(self, entry: dict[str, Any], clock: Callable[[], float]) -> None:
        super().__init__(entry)
        self._clock = clock
        self._asked_at: float | None = None
        self._patience_seconds = START_SECONDS
        receive = entry["dealer"].recv_multipart

        def heard(*arguments: Any, **options: Any) -> Any:
            self.answered()
            return receive(*arguments, **options)

        entry["dealer"].recv_multipart = heard

    def answered(self) -> None:
        """It sent something, so its event loop runs."""
        self._asked_at = None
        self._patience_seconds = SILENT_SECONDS

    async def ask(self) -> None:
        """Ask for a sign of life, unless an answer is owed already."""
        if self._asked_at is None:
            self._asked_at = self._clock()
            await self["dealer"].send_multipart(_QUESTION)

    @property
    def is_silent(self) -> bool:
        """Whether it owes an answer for too long."""
        asked_at = self._asked_at
        return asked_at is not None and self._clock() - asked_at > self._patience_seconds

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return value + _BUSY if key == "active" and self.is_silent else value

    def __setitem__(self, key: str, value: Any) -> None:
        # The pool counts with `worker["active"] += 1`, so what was added comes back here.
        super().__setitem__(key, value % _BUSY if key == "active" else value)


class WatchedPool(pool.EnvServerPool):
    """The pool with watched workers.

    >>> WatchedPool(...).silent_workers()  # doctest: +SKIP
    [4711]
    """

    def silent_workers(self) -> list[int]:
        """The pids of the workers that do not answer; may be asked from another thread."""
        return [w["process"].pid for w in list(self.workers) if w.is_silent]

    async def run(self) -> None:
        """Serve, and ask the workers meanwhile."""
        asking = asyncio.create_task(self._ask())
        try:
            await super().run()
        finally:
            asking.cancel()

    async def _ask(self) -> None:
        while True:
            for worker in list(self.workers):
                await worker.ask()
            await asyncio.sleep(ASK_SECONDS)

    def _spawn_worker(self) -> None:
        super()._spawn_worker()
        self.workers[-1] = WatchedWorker(self.workers[-1], time.monotonic)

    def _maybe_scale_up(self, in_flight: int) -> None:
        """With nobody left to play, one more worker starts, however few episodes there are."""
        has_room = self.max_workers is None or len(self.workers) < self.max_workers
        if has_room and all(worker.is_silent for worker in self.workers):
            self._spawn_worker()
            return
        super()._maybe_scale_up(in_flight)

"""The process of verifiers' pool, which `pool` starts with the numbers of both pipes and the
directory of the sockets.

It imports verifiers first and then reads its settings from stdin, so that it is warm when the
parent knows that the environment can be loaded. The parent's end of the death pipe closes when the
parent dies, which ends the pool. On the report pipe it writes one JSON object per line:
{"num_workers": n} when that changed, {"silent": [pid, ...]} when that changed,
{"lost": pid, "exit_code": n, "cause": text} for a worker that ended, and {"cause": text} before it
ends by an error itself.

verifiers sends each request to the worker with the fewest and never checks that it is alive: one
whose event loop is blocked, or that is stopped, gets more episodes and finishes none. Here the
broker asks every worker once a second, and one that does not answer in time looks busy.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from verifiers.v1.serve import pool, serve_env

from gradus.environments.compat import WORKER_FOLDER, keep_worker_sockets_in, watch_workers
from gradus.environments.harness.tool_servers import ToolServerLimits
from gradus.environments.pool import SILENT_SECONDS
from gradus.environments.worker import (
    cause_of,
    leave_soon,
    prepare_worker,
    read_cause,
    run_worker,
)
from gradus.log import LogSettings
from gradus.processes.child import die_with_parent

ASK_SECONDS = 1.0
"""Between two questions to a worker that answered."""
START_SECONDS = 300.0
"""How long a new worker may take to load its environment."""
WATCH_INTERVAL_SECONDS = 0.25
_BUSY = 1_000_000
_QUESTION = [b"gradus_alive", b"health", b"\xc0"]


class WatchedWorker(dict[str, Any]):
    """The pool's entry of one worker; `active` is huge while the worker is silent."""

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
        """Ask for a sign of life, unless an answer is due already."""
        if self._asked_at is None:
            self._asked_at = self._clock()
            await self["dealer"].send_multipart(_QUESTION)

    @property
    def is_silent(self) -> bool:
        """Whether an answer is overdue."""
        asked_at = self._asked_at
        return asked_at is not None and self._clock() - asked_at > self._patience_seconds

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return value + _BUSY if key == "active" and self.is_silent else value

    def __setitem__(self, key: str, value: Any) -> None:
        # The pool counts with `worker["active"] += 1`, so what was added comes back here.
        super().__setitem__(key, value % _BUSY if key == "active" else value)


class WorkerProcess(SpawnProcess):
    """A worker, which imports this package before verifiers, so that imports can wait."""

    def __init__(self, *, target: Callable[..., None], **options: Any) -> None:
        super().__init__(target=functools.partial(run_worker, target), **options)


class WatchedPool(pool.EnvServerPool):
    """The pool with watched workers.

    >>> WatchedPool(...).silent_workers()  # doctest: +SKIP
    [4711]
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._mpctx = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=WorkerProcess)

    def silent_workers(self) -> list[int]:
        """The pids of the workers that do not answer; may be asked from another thread."""
        return [w["process"].pid for w in list(self.workers) if w.is_silent]

    async def run(self) -> None:
        """Serve, and ask the workers in the background."""
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
        """When every worker is silent, one more starts, however few episodes there are."""
        has_room = self.max_workers is None or len(self.workers) < self.max_workers
        if has_room and all(worker.is_silent for worker in self.workers):
            self._spawn_worker()
            return
        super()._maybe_scale_up(in_flight)


class WorkerWatch(threading.Thread):
    """Tells the parent which workers there are and which one ended."""

    def __init__(self, report: TextIO, folder: Path) -> None:
        super().__init__(name="worker-watch", daemon=True)
        self._report = report
        self._folder = folder
        self._known: dict[int, BaseProcess] = {}
        self._silent: list[int] = []
        self._pool: WatchedPool | None = None

    def build_pool(self, *arguments: Any, **options: Any) -> WatchedPool:
        """The pool that `serve_env` makes, kept to ask it for silent workers."""
        self._pool = WatchedPool(*arguments, **options)
        return self._pool

    def run(self) -> None:
        """Look every quarter of a second; verifiers itself never looks."""
        while True:
            self.look()
            time.sleep(WATCH_INTERVAL_SECONDS)

    def look(self) -> None:
        """Report what changed since the last look."""
        started = False
        for process in multiprocessing.active_children():
            if process.pid is not None and process.pid not in self._known:
                self._known[process.pid] = process
                started = True
        for pid, process in list(self._known.items()):
            if process.exitcode is not None:
                del self._known[pid]
                cause = read_cause(self._folder, pid)
                self._write({"lost": pid, "exit_code": process.exitcode, "cause": cause})
        if started:
            self._write({"num_workers": len(self._known)})
        silent = [] if self._pool is None else self._pool.silent_workers()
        if silent != self._silent:
            self._silent = silent
            self._write({"silent": silent})

    def tell(self, error: Exception) -> None:
        """This process itself ends by an error."""
        self._write({"cause": cause_of(error)})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._report.write(json.dumps(line) + "\n")
            self._report.flush()
        except OSError:
            # The parent is gone; the death pipe ends this process.
            return


def main(death_fd: str, report_fd: str, folder: str) -> None:
    """Serve the environment until the parent dies or ends this process.

    Removes `folder` at the end; the parent does so too, unless it was killed. A pool of one
    worker dies with the parent; what launched both removes the directory then.
    """
    directory = Path(folder)
    try:
        settings: dict[str, Any] = json.loads(sys.stdin.readline() or "null") or {}
        if not settings:
            return
        limits = ToolServerLimits(**settings.pop("tool_servers"))
        secrets = settings.pop("secrets")
        name, headers_from = settings.pop("name"), settings.pop("headers_from")
        logs = LogSettings(**settings.pop("logs"))
        prepare = functools.partial(prepare_worker, name, limits, secrets, headers_from, logs)
        if settings["max_workers"] == 1:
            # No broker: this process runs the environment itself.
            die_with_parent()
        watch = WorkerWatch(os.fdopen(int(report_fd), "w"), directory / WORKER_FOLDER)
        watch.start()
        watch_workers(watch.build_pool)
        keep_worker_sockets_in(directory)
        try:
            serve_env(
                death_pipe=Connection(int(death_fd), writable=False),
                log_setup=prepare,
                **settings,
            )
        except Exception as error:
            watch.tell(error)
            raise
    finally:
        leave_soon()
        shutil.rmtree(directory, ignore_errors=True)

"""The process of verifiers' pool: `python -m gradus.environments.pool_process`
with the numbers of both pipes and the directory of the sockets.

It imports verifiers first and then reads its settings from stdin, so that it is warm when the
parent knows that the environment can be loaded. The parent's end of the death pipe closes when the
parent dies, which ends the pool. On the report pipe it writes one JSON object per line:
{"num_workers": n} when that changed, {"silent": [pid, ...]} when that changed, and
{"lost": pid, "exit_code": n} for a worker that ended.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from verifiers.v1.serve import serve_env

from gradus.environments.compat import keep_worker_sockets_in, watch_workers
from gradus.environments.tool_servers import ToolServerLimits
from gradus.environments.watched_pool import WatchedPool
from gradus.environments.worker import leave_soon, prepare_worker
from gradus.processes.child import die_with_parent

WATCH_INTERVAL_SECONDS = 0.25


class WorkerWatch(threading.Thread):
    """Tells the parent which workers there are and which one ended."""

    def __init__(self, report: TextIO) -> None:
        super().__init__(name="worker-watch", daemon=True)
        self._report = report
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
                self._write({"lost": pid, "exit_code": process.exitcode})
        if started:
            self._write({"num_workers": len(self._known)})
        silent = [] if self._pool is None else self._pool.silent_workers()
        if silent != self._silent:
            self._silent = silent
            self._write({"silent": silent})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._report.write(json.dumps(line) + "\n")
            self._report.flush()
        except OSError:
            # The parent is gone; the death pipe ends this process.
            return


def main(death_fd: int, report_fd: int, directory: Path) -> None:
    """Serve the environment until the parent dies or ends this process.

    Removes `directory` at the end; the parent does so too, unless it was killed. A pool of one
    worker dies with the parent; what launched both removes the directory then.
    """
    try:
        settings: dict[str, Any] = json.loads(sys.stdin.readline() or "null") or {}
        if not settings:
            return
        limits = ToolServerLimits(**settings.pop("tool_servers"))
        secrets = settings.pop("secrets")
        prepare = functools.partial(prepare_worker, settings.pop("name"), limits, secrets)
        if settings["max_workers"] == 1:
            # No broker: this process runs the environment itself.
            die_with_parent()
        watch = WorkerWatch(os.fdopen(report_fd, "w"))
        watch.start()
        watch_workers(watch.build_pool)
        keep_worker_sockets_in(directory)
        serve_env(
            death_pipe=Connection(death_fd, writable=False),
            log_setup=prepare,
            **settings,
        )
    finally:
        leave_soon()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

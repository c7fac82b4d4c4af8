"""The process that `pool` starts: the worker of an environment, or the broker of several.

It gets the numbers of both pipes and the directory of the sockets. It imports verifiers before
it reads its settings from stdin, so that it is warm by the time the parent has loaded the
environment. The parent's end of the death pipe closes when the parent dies, which ends the pool.
On the report pipe it writes one JSON object per line: the reports of `Broker`, and {"cause": text}
before it ends with an error.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from verifiers.v1.serve import serve_env

from gradus.environments.broker import Broker
from gradus.environments.pool import PoolSize
from gradus.environments.verifiers.table import WorkerSettings
from gradus.environments.verifiers.tool_servers import ToolServerLimits
from gradus.environments.worker import cause_of, leave_soon, prepare_worker, run_worker
from gradus.log import LogSettings, configure_logging
from gradus.processes.child import die_with_parent

WORKER_FOLDER = "w"
"""Holds the sockets of the workers, inside the pool's folder."""


def main(death_fd: str, report_fd: str, folder: str) -> None:
    """Serve the environment until the parent dies or ends this process.

    Removes `folder` at the end, as does the parent unless it was killed. A pool of one worker dies
    with the parent; then whatever launched both removes the directory.
    """
    directory = Path(folder)
    try:
        settings: dict[str, Any] = json.loads(sys.stdin.readline() or "null") or {}
        if settings:
            with os.fdopen(int(report_fd), "w") as file:
                report = functools.partial(_write, file)
                try:
                    _serve(settings, int(death_fd), directory, report)
                except Exception as error:
                    report({"cause": cause_of(error)})
                    raise
    finally:
        leave_soon()
        shutil.rmtree(directory, ignore_errors=True)


def _serve(
    settings: Mapping[str, Any], death_fd: int, directory: Path, report: Callable[..., None]
) -> None:
    size = PoolSize(**settings["size"])
    logs = LogSettings(**settings["logs"])
    patching = WorkerSettings(
        ToolServerLimits(**settings["tool_servers"]),
        settings["headers_from"],
        settings["warm_containers"],
    )
    prepare = functools.partial(
        prepare_worker, settings["name"], patching, settings["secrets"], logs
    )
    serving = {"max_workers": 1, "log_setup": prepare, "config_data": settings["config_data"]}
    address = settings["address"]
    if size.max_workers == 1:
        # No broker: this process runs the environment itself.
        die_with_parent()
        serve_env(address=address, death_pipe=Connection(death_fd, writable=False), **serving)
        return
    configure_logging(f"env_{settings['name']}[{os.getpid()}]", logs)
    folder = directory / WORKER_FOLDER
    folder.mkdir(mode=0o700)
    start = functools.partial(_start_worker, serving)
    broker = Broker(address, size, folder, start_worker=start, report=report)
    asyncio.run(_until_told(broker.run, death_fd))


def _start_worker(serving: Mapping[str, Any], address: str) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    death_read, death_write = context.Pipe(duplex=False)
    settings = {**serving, "address": address, "death_pipe": death_read}
    process = context.Process(target=run_worker, kwargs=settings)
    process.start()
    death_read.close()
    return process, death_write


async def _until_told(run: Callable[[], Any], death_fd: int) -> None:
    """Run until a stop signal, or until the parent is gone."""
    serving = asyncio.create_task(run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    loop.add_reader(death_fd, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return


def _write(file: TextIO, line: Mapping[str, Any]) -> None:
    try:
        file.write(json.dumps(line) + "\n")
        file.flush()
    except OSError:
        # The parent is gone; the death pipe ends this process.
        return

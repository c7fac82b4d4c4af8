"""A real environment process for tests, started as the launcher starts it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from gradus.config import EnvironmentProcessConfig
from gradus.run.paths import RunDirectory
from gradus.testing.running_process import RunningProcess

START_TIMEOUT_SECONDS = 90.0


class RunningEnvironment(RunningProcess):
    """Owns one environment process and a client of its task socket.

    with RunningEnvironment(config, python_path=[folder]) as environment:
        environment.wait_ready()
        await environment.ask(method="info")
    """

    def __init__(
        self,
        config: EnvironmentProcessConfig,
        *,
        python_path: list[Path] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        run_dir = RunDirectory(Path(config.run_dir))
        file = run_dir.config / f"{config.process}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(config.model_dump_json())
        paths = [str(path) for path in python_path or []]
        super().__init__(
            [sys.executable, "-m", "gradus.cli.main", "env-server", "@", str(file)],
            ready_file=run_dir.ready_file(config.process),
            log_file=run_dir.logs / "envs" / config.purpose / f"{config.name}.log",
            start_timeout_seconds=START_TIMEOUT_SECONDS,
            variables={
                **os.environ,
                # verifiers keeps its working folders below the home directory.
                "HOME": config.run_dir,
                "PYTHONPATH": os.pathsep.join(paths),
                **(variables or {}),
            },
        )

    @property
    def error_line(self) -> str:
        """The one line that says why it ended."""
        lines = [line for line in self.log.splitlines() if line.startswith("gradus env-server:")]
        assert len(lines) == 1, self.log
        return lines[0]

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The reply of the task socket to one request."""
        address = self.wait_ready()["task_address"]
        frames = await exchange(address, [b"any id", msgspec.msgpack.encode(request)])
        assert frames[0] == b"any id"
        reply: dict[str, Any] = msgspec.msgpack.decode(frames[1])
        return reply


async def exchange(
    address: str, frames: list[bytes], *, timeout_seconds: float = 10.0
) -> list[bytes]:
    """Send one message from a fresh DEALER and return the reply; TimeoutError without one."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(address)
        async with asyncio.timeout(timeout_seconds):
            await socket.send_multipart(frames)
            received: list[bytes] = await socket.recv_multipart()
            return received
    finally:
        socket.close()
        context.term()

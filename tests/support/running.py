"""Environments and inference servers in processes for tests, started as the launcher does."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from commands import wait_until

from gradus.config import EnvironmentProcessConfig, InferenceProcessConfig
from gradus.files import read_json, write_atomically
from gradus.processes.table import ProcessEntry, descendants, is_alive, living_processes
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory

_TESTS = Path(__file__).parents[1]
TEST_PATH = os.pathsep.join([str(_TESTS / "environments"), str(_TESTS / "support")])
"""PYTHONPATH of a process that loads an environment of the tests."""
STOP_TIMEOUT_SECONDS = 45.0
"""A process that imports reads its signal late."""
_ENVIRONMENT_START_SECONDS = 240.0
_INFERENCE_START_SECONDS = 240.0


class RunningProcess:
    """Owns one process with its log and its ready file; leaves nothing behind at the end.

    with RunningEnvironment(config) as environment:
        environment.wait_ready()
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        ready_file: Path,
        log_file: Path,
        start_timeout_seconds: float,
        variables: dict[str, str] | None = None,
    ) -> None:
        """Start it; `variables` replace the whole environment."""
        self.log_file = log_file
        self._ready_file = ready_file
        self._start_timeout_seconds = start_timeout_seconds
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("wb") as log:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """Everything that the process wrote so far."""
        return self.log_file.read_text(errors="replace")

    def wait_ready(self) -> dict[str, Any]:
        """What its ready file says, once it is there; AssertionError with the log when it ended."""
        wait_until(
            lambda: self._ready_file.exists() or self.process.poll() is not None,
            timeout_seconds=self._start_timeout_seconds,
            what=f"{self._ready_file.name}, written when the process is ready",
        )
        assert self._ready_file.exists(), self.log
        ready: dict[str, Any] = read_json(self._ready_file)
        return ready

    def below(self) -> list[ProcessEntry]:
        """Every process that it started, and those that they started."""
        return descendants(self.process.pid, living_processes())

    def wait_exit(self) -> int:
        """Its exit code."""
        return self.process.wait(self._start_timeout_seconds)

    def stop(self) -> int:
        """End it as the launcher does; its exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(STOP_TIMEOUT_SECONDS)


class RunningEnvironment(RunningProcess):
    """Owns one environment process and a client of its socket.

    with RunningEnvironment(config) as environment:
        environment.wait_ready()
        await environment.ask("info")
    """

    def __init__(
        self,
        config: EnvironmentProcessConfig,
        *,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        run_dir = RunDirectory(Path(config.run_dir))
        file = run_dir.config / f"{config.process}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(config.model_dump_json())
        super().__init__(
            [python, "-m", "gradus.cli.main", "env-server", "@", str(file)],
            ready_file=run_dir.ready_file(config.process),
            log_file=run_dir.logs / "envs" / config.purpose / f"{config.name}.log",
            start_timeout_seconds=_ENVIRONMENT_START_SECONDS,
            variables={
                **os.environ,
                # verifiers keeps its working folders below the home directory.
                "HOME": config.run_dir,
                "PYTHONPATH": TEST_PATH,
                **(variables or {}),
            },
        )

    @property
    def error_line(self) -> str:
        """The one line that says why it ended."""
        lines = [line for line in self.log.splitlines() if line.startswith("gradus env-server:")]
        assert len(lines) == 1, self.log
        return lines[0]

    async def ask(self, method: str, **request: Any) -> dict[str, Any]:
        """The reply to one request."""
        address = self.wait_ready()["run_address"]
        frames = await exchange(
            address, [b"any id", method.encode(), msgspec.msgpack.encode(request)]
        )
        assert frames[:2] == [b"any id", b"reply"]
        reply: dict[str, Any] = msgspec.msgpack.decode(frames[2])
        return reply


async def exchange(
    address: str, frames: list[bytes], *, timeout_seconds: float = 60.0
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


class RunningInference(RunningProcess):
    """Owns one inference process, its run directory's lease and tokens.

    with RunningInference(config) as server:
        server.wait_ready()
        ...  # GET f"{server.base_url}/health" with server.data_token
    """

    def __init__(
        self, config: InferenceProcessConfig, *, command: Iterable[str] | None = None
    ) -> None:
        self.run_dir = RunDirectory(Path(config.run_dir))
        self.model_dir = Path(config.model.name)
        self.data_token = secrets.token_hex(32)
        self.admin_token = secrets.token_hex(32)
        write_atomically(self.run_dir.inference_token, self.data_token.encode(), mode=0o600)
        write_atomically(self.run_dir.admin_token, self.admin_token.encode(), mode=0o600)
        self.lease = RunLease.take(self.run_dir)
        config = config.model_copy(update={"term": self.lease.term})
        file = self.run_dir.config / "inference.json"
        write_atomically(file, config.model_dump_json().encode())
        role = ["-m", "gradus.cli.main", "inference", "@", str(file)]
        super().__init__(
            [sys.executable, *(role if command is None else command)],
            ready_file=self.run_dir.ready_file("inference"),
            log_file=self.run_dir.logs / "inference.log",
            start_timeout_seconds=_INFERENCE_START_SECONDS,
        )

    @property
    def term(self) -> int:
        """Term of the run's lease, which the server was started with."""
        return self.lease.term

    @property
    def run_id(self) -> str:
        """Name of the run directory."""
        return self.run_dir.root.name

    @property
    def base_url(self) -> str:
        """Where it serves, from the ready file."""
        url: str = self.wait_ready()["base_url"]
        return url

    def stop(self) -> int:
        """End it as the launcher does: it alone is asked first, then what it left."""
        self.process.terminate()
        code = self.process.wait(STOP_TIMEOUT_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        return code

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self.lease.release()


def wait_until_ended(entries: list[ProcessEntry]) -> None:
    """AssertionError unless all of these processes end within seconds."""
    wait_until(lambda: not [e for e in entries if is_alive(e.pid, e.start_time)], what="their end")

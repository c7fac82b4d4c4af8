"""A real inference server for tests, started as the launcher starts it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from gradus.config.process import InferenceProcessConfig
from gradus.lease import RunLease
from gradus.run_dir import RunDirectory, read_json, write_atomically
from gradus.testing.waiting import wait_until

START_TIMEOUT_SECONDS = 240.0
STOP_TIMEOUT_SECONDS = 20.0


class RunningInference:
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
        config = config.model_copy(update={"epoch": self.lease.epoch})
        file = self.run_dir.config / "inference.json"
        write_atomically(file, config.model_dump_json().encode())
        self.log_file = self.run_dir.logs / "inference.log"
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        role = ["-m", "gradus.cli.main", "inference", "@", str(file)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(role if command is None else command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def epoch(self) -> int:
        """Epoch of the run's lease, which the server was started with."""
        return self.lease.epoch

    @property
    def run_id(self) -> str:
        """Name of the run directory."""
        return self.run_dir.root.name

    @property
    def base_url(self) -> str:
        """Where it serves, from the ready file."""
        url: str = self.wait_ready()["base_url"]
        return url

    @property
    def log(self) -> str:
        """Everything that the process wrote so far."""
        return self.log_file.read_text(errors="replace")

    def wait_ready(self) -> dict[str, Any]:
        """What its ready file says, once it is there; AssertionError with the log when it ended."""
        ready_file = self.run_dir.ready_file("inference")
        wait_until(
            lambda: ready_file.exists() or self.process.poll() is not None,
            timeout_seconds=START_TIMEOUT_SECONDS,
            what="the ready file of the inference server",
        )
        assert ready_file.exists(), self.log
        ready: dict[str, Any] = read_json(ready_file)
        return ready

    def wait_exit(self) -> int:
        """Its exit code."""
        return self.process.wait(START_TIMEOUT_SECONDS)

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
            self.lease.release()

"""A process of a run for tests, started as the launcher starts it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

from gradus.files import read_json
from gradus.testing.waiting import wait_until

STOP_TIMEOUT_SECONDS = 20.0


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

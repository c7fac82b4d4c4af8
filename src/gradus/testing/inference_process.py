"""A real inference server for tests, started as the launcher starts it."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from gradus.config import InferenceProcessConfig
from gradus.files import write_atomically
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.testing.running_process import RunningProcess

START_TIMEOUT_SECONDS = 240.0


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
            start_timeout_seconds=START_TIMEOUT_SECONDS,
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

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self.lease.release()

"""A frozen model behind vLLM's plain server, for as long as a run needs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

KEY_VARIABLE = "TEACHER_KEY"
"""Named in the configs; holds the key of the server."""
KEY = "a-key-for-this-machine-only"
URL = "http://127.0.0.1:8011"
"""Stands in the configs too."""
START_SECONDS = 240.0
STOP_SECONDS = 20.0


def serve_arguments(model: Path) -> list[str]:
    """The words behind `python`; vLLM's CPU package has no working `vllm` command."""
    host, _, port = URL.removeprefix("http://").partition(":")
    settings = ["--max-model-len", "128", "--max-num-seqs", "64", "--enforce-eager"]
    where = ["--host", host, "--port", port, "--served-model-name", "teacher"]
    server = ["-m", "vllm.entrypoints.openai.api_server"]
    return [*server, "--model", str(model), *where, *settings]


def serve_environment(caller: Mapping[str, str]) -> dict[str, str]:
    """One thread and a small cache: the run beside it needs the machine."""
    return {
        **caller,
        "VLLM_API_KEY": KEY,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def served(model: Path, log: Path) -> Iterator[dict[str, str]]:
    """Serve `model` at `URL`; gives the variables that a run needs. SystemExit when it ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *serve_arguments(model)],
            env=serve_environment(os.environ),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_it_answers(server, log)
        yield {KEY_VARIABLE: KEY}
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_it_answers(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the teacher ended with code {server.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the teacher did not answer in {START_SECONDS:.0f} s; see {log}")

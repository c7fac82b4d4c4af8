"""Importing the engine's modules in a helper process while this one imports the server's."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from typing import Any

PRELOADED_MODULES = (
    # First: it hides what transformers and vLLM would fail to import.
    "gradus",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "gradus.inference.weight_worker",
)


def start_engine_forkserver() -> None:
    """Start the process that the engine will be forked from; returns at once.

    Imports of torch and vLLM cost several seconds of CPU per process; with this the server and
    the engine pay them at the same time on two cores, not one after the other. Must run after the
    environment is complete: OpenMP and vLLM read it when they are loaded.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED_MODULES))
    forkserver.ensure_running()
    server: Any = forkserver
    atexit.register(_end_process, server._forkserver._forkserver_pid)


def _end_process(pid: int) -> None:
    """It owns nothing; ending by itself, it would list what its libraries did not free."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

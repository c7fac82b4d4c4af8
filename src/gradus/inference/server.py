"""Starting the inference server: what can be refused is refused before vLLM is loaded."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from gradus.companions import show_torchvision
from gradus.config import InferenceProcessConfig, ModelConfig
from gradus.errors import ConfigError, refuse
from gradus.files import read_json
from gradus.inference.guard import Tokens
from gradus.inference.settings import (
    CLEARED_VARIABLES,
    ServedModel,
    is_cpu_build,
    process_environment,
)
from gradus.log import engine_handler, get_logger
from gradus.plan.machine import model_problems
from gradus.processes.child import uncollected
from gradus.processes.listening import bind, inherited_listener
from gradus.processes.secured import CERTIFICATE_VARIABLE, server_context
from gradus.run.model_files import ask_hub, reads_images
from gradus.run.paths import RunDirectory

logger = get_logger(__name__)
SHARED_MODULES = (
    # First: it hides what transformers and vLLM would fail to import.
    "gradus",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "gradus.inference.engine.worker",
    "vllm.model_executor.model_loader",
    "gradus.inference.weight_worker",
)
"""What the engine's process has from this one, which imports it first."""
ENGINE_FORKSERVER = "vllm-forkserver"
"""Name of the process that the engine is forked from; the kernel keeps 15 bytes."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder in which vLLM makes its sockets; `/tmp` without it."""
_MAX_FOLDER_BYTES = 70
"""A socket's path has at most 107 bytes, and vLLM's name for it 37."""


def run(config: InferenceProcessConfig) -> None:
    """Serve the policy until SIGTERM or SIGINT.

    Writes the ready file once a generate request was answered. Refuses with ConfigError: a model
    that is not there, a port in use, a host that others can reach without allow_public_bind;
    HubError when the hub is to say whether there is such a model, and is not reached.
    """
    run_dir = RunDirectory(Path(config.run_dir))
    check_name(run_dir, config.process)
    check_model(config.model)
    ask_hub(config.model.name)
    tokens = Tokens.read_or_make(run_dir)
    own = config.inference
    if config.certificate is not None:
        os.environ[CERTIFICATE_VARIABLE] = config.certificate
    server_context()  # what is wrong with a certificate is known before the engine starts
    with inherited_listener() or bind(
        own.host, own.port, allow_public_bind=own.allow_public_bind
    ) as listener:
        prepare_process(config)
        # Imported this late because vLLM reads its environment variables while it is imported.
        with uncollected():
            vllm_server = importlib.import_module("gradus.inference.vllm_server")
        vllm_server.serve_policy(config, listener, tokens)


def run_model_server(model: ServedModel, on_listening: Callable[[str], None]) -> None:
    """Serve a model to OpenAI clients until SIGTERM or SIGINT; refusals as in `run`."""
    check_model(model.config.model)
    own = model.config.inference
    with inherited_listener() or bind(
        own.host, own.port, allow_public_bind=own.allow_public_bind
    ) as listener:
        prepare_process(model.config)
        with uncollected():
            vllm_server = importlib.import_module("gradus.inference.vllm_server")
        vllm_server.serve_model(model, listener, on_listening)


def check_name(run_dir: RunDirectory, process: str) -> None:
    """ConfigError for a name under which another process of the run says that it is ready."""
    ready = run_dir.ready_file(process)
    if ready.exists() and "base_url" not in read_json(ready):
        raise ConfigError(
            f"process: {process!r} is the name of another process of {run_dir.root}; choose one "
            "of its own, such as 'node7'"
        )


def prepare_process(config: InferenceProcessConfig) -> None:
    """Set what vLLM reads while it is imported, and begin to import it."""
    if reads_images(config.model.name):
        show_torchvision()
    is_cpu = is_cpu_build()
    cores = len(os.sched_getaffinity(0))
    os.environ.update(process_environment(config, os.environ, is_cpu=is_cpu, num_cores=cores))
    keep_files_private()
    for name in CLEARED_VARIABLES:
        os.environ.pop(name, None)
    if is_cpu:
        start_engine_forkserver()


def keep_files_private() -> None:
    """Let vLLM's processes keep sockets and temporary files in a folder that only this user enters.

    The launcher of a run names its own, and removes it with what an engine that was killed left.
    Without one, or where its path leaves no room for the name of a socket (`unix(7)`), it is a
    folder in /tmp that goes when this process ends. Compiled code stays for the next run.
    """
    folder = os.environ.get(_SOCKETS, "")
    if not folder or len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        folder = tempfile.mkdtemp(prefix="gradus-engine-", dir="/tmp")
        # After multiprocessing has removed its own folder inside, which has priority -100.
        Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)
        os.environ[_SOCKETS] = folder
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def check_model(model: ModelConfig) -> None:
    """ConfigError for what is neither a directory with a complete model nor a name on the hub."""
    refuse([*model_problems(model)])


def start_engine_forkserver() -> None:
    """Import what server and engine share, and fork the process that forks the engine.

    torch and vLLM cost six seconds of CPU to import, half of what a run takes to start on two
    cores; Python's own forkserver is a program of its own that would import them again. Must run
    after the environment is complete, because OpenMP and vLLM read it when they are loaded, and
    before the server has threads.
    """
    with uncollected():
        for name in SHARED_MODULES:
            importlib.import_module(name)
    resource_tracker.ensure_running()  # by itself, not as a copy of this process
    server: Any = forkserver
    patched: Any = util
    original = patched.spawnv_passfds
    patched.spawnv_passfds = _fork_forkserver
    try:
        server.ensure_running()
    finally:
        patched.spawnv_passfds = original
    atexit.register(_end_process, server._forkserver._forkserver_pid)


def _fork_forkserver(_program: str, _words: Sequence[str], passed: Sequence[int]) -> int:
    """In the place of starting `multiprocessing.forkserver` by name: its two file descriptors stay
    open in a fork of this process, which never returns."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        _leave_the_server(passed)
        listener, alive = passed
        forkserver.main(listener, alive, [])
    except SystemExit:
        status = 0
    except BaseException:
        logger.exception("the process that the engine is forked from ends")
    finally:
        os._exit(status)


def _leave_the_server(passed: Sequence[int]) -> None:
    """In a copy of the server: give up its address, its handlers of signals, and its logger's name
    and level."""
    # Its name alone: a title would overwrite the variables by which leftovers are known.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(ENGINE_FORKSERVER)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for opened in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *passed}:
        with contextlib.suppress(OSError):  # that of the list itself
            os.close(opened)
    logging.getLogger().handlers.clear()
    engine_handler()


def _end_process(pid: int) -> None:
    """It holds nothing. Left to end by itself, it would print what its libraries did not free."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

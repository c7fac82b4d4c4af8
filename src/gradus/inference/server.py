"""Starting the inference server: what can be refused is refused before vLLM is loaded."""

from __future__ import annotations

import errno
import importlib
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path

from gradus.config import InferenceProcessConfig, ModelConfig
from gradus.errors import ConfigError
from gradus.inference.guard import Tokens
from gradus.inference.preload import start_engine_forkserver
from gradus.inference.settings import (
    CLEARED_VARIABLES,
    ServedModel,
    is_cpu_build,
    process_environment,
)
from gradus.log import get_logger
from gradus.processes.child import uncollected
from gradus.run.paths import RunDirectory

logger = get_logger(__name__)
BACKLOG = 2048


def run(config: InferenceProcessConfig) -> None:
    """Serve the policy until SIGTERM or SIGINT.

    Writes the ready file once a generate request was answered. Refuses with ConfigError: a model
    that is not there, a port in use, a host that others can reach without allow_public_bind.
    """
    check_model(config.model)
    tokens = Tokens.read_or_make(RunDirectory(Path(config.run_dir)))
    own = config.inference
    with bind(own.host, own.port, allow_public_bind=own.allow_public_bind) as listener:
        prepare_process(config)
        # Imported this late because vLLM reads its environment variables while it is imported.
        with uncollected():
            vllm_server = importlib.import_module("gradus.inference.vllm_server")
        vllm_server.serve(config, listener, tokens)


def run_model_server(model: ServedModel, on_listening: Callable[[str], None]) -> None:
    """Serve a model to OpenAI clients until SIGTERM or SIGINT; refusals as in `run`."""
    check_model(model.config.model)
    own = model.config.inference
    if model.token is None and not _resolve(own.host).is_loopback:
        raise ConfigError(
            f"--no-token: {own.host!r} can be reached from other machines; leave --no-token away, "
            "or serve on 127.0.0.1"
        )
    with bind(own.host, own.port, allow_public_bind=own.allow_public_bind) as listener:
        prepare_process(model.config)
        with uncollected():
            model_server = importlib.import_module("gradus.inference.model_server")
        model_server.serve(model, listener, on_listening)


def prepare_process(config: InferenceProcessConfig) -> None:
    """Set what vLLM reads while it is imported, and begin to import it."""
    is_cpu = is_cpu_build()
    cores = len(os.sched_getaffinity(0))
    os.environ.update(process_environment(config, os.environ, is_cpu=is_cpu, num_cores=cores))
    for name in CLEARED_VARIABLES:
        os.environ.pop(name, None)
    if is_cpu:
        start_engine_forkserver()


def check_model(model: ModelConfig) -> None:
    """ConfigError when `model.name` is a path without a complete model in it.

    A name without a leading `/`, `.` or `~` that is no directory is left to the hub.
    """
    directory = Path(model.name)
    if not directory.is_dir():
        if model.name.startswith(("/", ".", "~")) or model.name.count("/") != 1:
            raise ConfigError(
                f"model.name: there is no directory {model.name!r}; give the path of a Hugging "
                "Face model directory, or a hub name such as 'Qwen/Qwen3-0.6B'"
            )
        return
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.name: {directory} has no config.json; it is no model directory")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"model.name: {directory} has no *.safetensors file; save the model with safetensors"
        )


def bind(host: str, port: int, *, allow_public_bind: bool) -> socket.socket:
    """A socket that listens; ConfigError when that cannot be.

    Port 0 lets the system choose. Listening at once keeps everybody else off the port while vLLM
    loads; who connects meanwhile waits.
    """
    address = _resolve(host)
    if not address.is_loopback and not allow_public_bind:
        raise ConfigError(
            f"inference.host: {host!r} can be reached from other machines; use 127.0.0.1, or set "
            "inference.allow_public_bind when the network is yours"
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"inference.port: {port} on {host} is in use; stop its owner, choose another, "
                "or use 0 for a free one"
            ) from error
        raise ConfigError(
            f"inference: cannot listen on {host}:{port} ({error.strerror})"
        ) from error
    return listener


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"inference.host: {host!r} is not an address ({error})") from error
    return ipaddress.ip_address(found[0][4][0])

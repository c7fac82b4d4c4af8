"""The variables of each process, built from nothing: an allow-list, defaults, and the config's.

A secret in the caller's shell reaches only the roles that need it: hub tokens reach those that load
models, keys of other endpoints only the environment whose config names them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.config import EnvironmentConfig, variables_named_in
from gradus.installed import has_module
from gradus.plan.gpus import VISIBLE
from gradus.processes.started import PASSED_TO_EVERY_PROCESS

_EVERYWHERE = PASSED_TO_EVERY_PROCESS | {"LD_PRELOAD"}
_HUB = frozenset({"HF_TOKEN", "HF_TOKEN_PATH"})
_TRACKERS = ("WANDB_", "MLFLOW_", "TRACKIO_", "TENSORBOARD_")
"""What the libraries of trackers read, keys too."""
_SANDBOXES = frozenset({"DOCKER_HOST"})
_COMPUTE_PREFIXES = (
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "VLLM_",
)
_PROXY_USER = re.compile(r"^(\w+://)?[^/]*@")
"""`user:password@` of the URL of a proxy, with and without a scheme."""
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOOKS_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")

_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A helper of multiprocessing speaks after the process has ended; see gradus.log.end_quietly.
    "PYTHONWARNINGS": "ignore:resource_tracker",
}


_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables of torch's allocator on GPUs; of several, it reads the first."""

_LIGHT = {"OMP_NUM_THREADS": "1", VISIBLE: ""}
"""Of processes that move tokens: one thread for numerics, and no GPU, on which a library that looks
around would take half a gigabyte."""


@dataclass(frozen=True)
class CoreShares:
    """Cores of a machine without GPUs for the parts that compute."""

    trainer: int
    """Over all ranks."""
    engine: int | None = None
    """Of each engine. None leaves it to the engine: all cores but one."""


def share_cores(num_cores: int, *, trains: bool, num_engines: int) -> CoreShares:
    """How many cores the threads of the trainer and of each engine may count on.

    Both compute at the same time. With more threads than cores every part of a matrix product waits
    for the thread that is not running, so from four cores on each side gets half of what is left
    beside the server, the environments and the orchestrator. On two or three, where a half is one
    thread, either side uses what the other leaves idle: the CPU time of a step was the same with
    one thread of the trainer and with two.

    >>> share_cores(16, trains=True, num_engines=1), share_cores(16, trains=True, num_engines=2)
    (CoreShares(trainer=7, engine=6), CoreShares(trainer=7, engine=3))
    """
    if num_engines < 2 and (num_cores < 4 or not (trains and num_engines)):
        return CoreShares(num_cores)
    left = num_cores - 1 - num_cores // 8
    own = 0 if not trains else num_cores if num_cores < 4 else left - left // 2
    return CoreShares(own or num_cores, max(1, (left - own) // num_engines))


def inference_variables(
    caller: Mapping[str, str], own: Mapping[str, str], *, num_cores: int | None = None
) -> dict[str, str]:
    """The inference server chooses its own number of threads where `num_cores` is None."""
    threads = {} if num_cores is None else {"OMP_NUM_THREADS": str(num_cores)}
    return _build(caller, {**threads, **own}, names=_HUB, prefixes=_COMPUTE_PREFIXES)


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Where ranks on one machine talk; to NCCL, "lo" would be whatever begins so."""


def trainer_variables(
    caller: Mapping[str, str], own: Mapping[str, str], *, num_cores: int, num_processes: int
) -> dict[str, str]:
    """The ranks share the trainer's cores evenly and talk over loopback."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_processes)),
        # Threads that spin while they wait lose most of their time once the engine wants a
        # core: 1,700 instead of 10,700 trained tokens/s were measured on two busy cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: value for name, value in LOOPBACK.items() if name not in caller},
        # On CPUs a product in bfloat16 is compiled for its shape and kept by both, 1,024 each by
        # default: micro batches of ever new lengths filled 1 GB more than this in 120 steps.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "LRU_CACHE_CAPACITY": "128",
    }
    if not any(name in given for name in _ALLOCATORS for given in (caller, own)):
        # Micro batches differ in length: segments that grow leave no gaps between them. Not for
        # the engine, whose memory pool for sleeping turns it off again.
        defaults[_ALLOCATORS[0]] = "expandable_segments:True"
    return _build(caller, {**defaults, **own}, names=_HUB, prefixes=_COMPUTE_PREFIXES)


def orchestrator_variables(
    caller: Mapping[str, str], own: Mapping[str, str], *, config: Mapping[str, Any]
) -> dict[str, str]:
    """One thread for numerics: the orchestrator waits and moves tokens. Of the caller's keys only
    those that the config names, for reference models."""
    names = variables_named_in(config) | set(_HUB)
    return _build(caller, {**_LIGHT, **own}, names=names)


def tracker_variables(caller: Mapping[str, str], *, passed: Iterable[str] = ()) -> dict[str, str]:
    """With the keys and addresses of tracking services, and what the config passes."""
    return _build(caller, _LIGHT, names={*passed, *_HUB}, secret_prefixes=_TRACKERS)


def source_variables(
    caller: Mapping[str, str],
    own: Mapping[str, str],
    *,
    verifiers: Mapping[str, Any],
    passed: Iterable[str] = (),
) -> dict[str, str]:
    """Of all secrets only those that the config names; the hub's token is none of them unless it is
    named. A gated tokenizer is in the hub's cache once the engine runs, which fetches it.

    `passed` are names that the config passes from the caller. The password of a proxy is
    removed unless the proxy's variable is one of them.
    """
    names = variables_named_in(verifiers) | set(passed) | _SANDBOXES
    readable = {
        name: value
        if name in names or not name.lower().endswith("_proxy")
        else _PROXY_USER.sub(r"\1", value)
        for name, value in caller.items()
    }
    light = {name: value for name, value in _LIGHT.items() if name not in names}
    return _build(readable, {**light, **own}, names=names)


_ENGINES = ("docker", "podman", "apptainer")
_SERVICES = {
    "modal": ("modal", ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"), ".modal.toml"),
    "e2b": ("e2b", ("E2B_API_KEY",), None),
    "prime": ("prime_sandboxes", ("PRIME_API_KEY",), ".prime/config.json"),
}
"""Runtime that a service runs → its package, variables of its key, and the file in the home folder
that may hold the key too."""


def runtime_problem(
    runtime: Mapping[str, Any], source: EnvironmentConfig, caller: Mapping[str, str]
) -> str | None:
    """Why no episode can start in a runtime: no program, no package, or no key that the process of
    the environment would see."""
    kind = str(runtime.get("type"))
    if kind in _ENGINES and shutil.which(kind) is None:
        there = next((name for name in _ENGINES if shutil.which(name)), None)
        advice = f"install it, or write {there!r}, which is here" if there else "install one"
        return f"{kind!r}: there is no program of this name on PATH; {advice}"
    if kind not in _SERVICES:
        return None
    package, keys, file = _SERVICES[kind]
    if source.python is None and not has_module(package):
        return f"{kind!r} needs the package {package!r}; install it, or write another runtime"
    given = {*source.env_vars, *(name for name in source.pass_env if name in caller)}
    is_named = any(name.startswith(f"{kind.upper()}_") for name in given)
    if is_named or (file is not None and (Path.home() / file).is_file()):
        return None
    names = ", ".join(f'"{name}"' for name in keys)
    missing = [name for name in keys if name not in {*caller, *source.env_vars}]
    where = f"set {' and '.join(missing)} in this shell and write" if missing else "write"
    return f"{kind!r}: the environment would have no key of it; {where} pass_env = [{names}]"


def _build(
    caller: Mapping[str, str],
    own: Mapping[str, str],
    *,
    names: Iterable[str] = (),
    prefixes: tuple[str, ...] = (),
    secret_prefixes: tuple[str, ...] = (),
) -> dict[str, str]:
    allowed = _EVERYWHERE | set(names)
    passed = {
        name: value
        for name, value in caller.items()
        if name in allowed
        or name.startswith(("LC_", *secret_prefixes))
        or (name.startswith(prefixes) and not _LOOKS_SECRET.search(name))
    }
    return _past_proxies({**passed, **_DEFAULTS, **own})


def _past_proxies(variables: dict[str, str]) -> dict[str, str]:
    """Processes of a run talk over loopback, which no proxy reaches; what the user excepts stays.

    >>> _past_proxies({"http_proxy": "http://proxy:3128", "NO_PROXY": "intranet"})["no_proxy"]
    'intranet,localhost,127.0.0.1,::1'
    """
    if not any(name.lower() in _PROXIES for name in variables):
        return variables
    either = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    for name in ("no_proxy", "NO_PROXY"):
        kept = [part for part in (variables.get(name) or either).split(",") if part.strip()]
        # A `*` excepts every host, but only by itself.
        known = {part.strip() for part in kept}
        missing = [host for host in _LOOPBACK if not known & {host, "*"}]
        variables[name] = ",".join([*kept, *missing])
    return variables

"""Environment variables that gradus itself sets, and why a config may not set them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem

_VALID_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

PASSED_TO_EVERY_PROCESS = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "PYTHONWARNINGS",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE",
        "HF_ENDPOINT",
        "TRANSFORMERS_OFFLINE",
    }
)
"""What programs need of the caller's shell; none of it is a secret."""

_EVERYWHERE: Mapping[str, str] = {
    "GRADUS_DEATH_PIPE": "it tells a process that its launcher is gone",
    "GRADUS_INFERENCE_TOKEN": "each process reads the run's token from the run directory",
}
RESERVED: Mapping[str, Mapping[str, str]] = {
    "trainer": dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "torchrun tells each rank its place with it; use num_processes",
    ),
    "inference": {
        "DO_NOT_TRACK": "no process of a run reports its use",
        "TOKENIZERS_PARALLELISM": "tokenizers that fork would wait for each other for ever",
        "VLLM_API_KEY": "every route is guarded by the run's own tokens",
        "VLLM_CONFIGURE_LOGGING": "logs of all processes have one form",
        "VLLM_CPU_KVCACHE_SPACE": "use inference.kv_cache_gib",
        "VLLM_NO_USAGE_STATS": "no process of a run reports its use",
        "VLLM_PLUGINS": "gradus chooses the plug-ins that it can serve with",
        "VLLM_SERVER_DEV_MODE": "the routes that it opens stay behind the run's own guard",
    },
    "environment": {},
    "orchestrator": {},
}
"""Role → variable → the reason, which completes "gradus sets it itself: ..."."""


def env_vars_problems(role: str, path: KeyPath, env_vars: Mapping[str, str]) -> list[Problem]:
    """The variables of one process that cannot be set, each with the reason; never the values."""
    reserved = {**_EVERYWHERE, **RESERVED[role]}
    problems = []
    for name, value in env_vars.items():
        place = (*path, name)
        if not _VALID_NAME.fullmatch(name):
            problems.append(Problem(place, "is no name of a variable; use letters, digits, '_'"))
        elif name in reserved:
            reason = f"gradus sets it itself: {reserved[name]}. Remove it here"
            problems.append(Problem(place, reason))
        elif name.startswith("GRADUS_"):
            problems.append(Problem(place, "names beginning with GRADUS_ belong to gradus itself"))
        elif "\0" in value:
            problems.append(Problem(place, "its value holds a NUL character"))
    return problems


def variables_named_in(verifiers_config: Mapping[str, Any]) -> set[str]:
    """Variables that a verifiers config itself names: keys of other endpoints, forwarded ones."""
    return set(_named_in(verifiers_config))


def _named_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for entry in value:
            yield from _named_in(entry)
    if not isinstance(value, Mapping):
        return
    for key, entry in value.items():
        if key == "api_key_var" and isinstance(entry, str):
            yield entry
        elif key == "forward_env" and isinstance(entry, list):
            yield from (name for name in entry if isinstance(name, str))
        elif key == "headers_from_env" and isinstance(entry, Mapping):
            yield from (name for name in entry.values() if isinstance(name, str))
        else:
            yield from _named_in(entry)

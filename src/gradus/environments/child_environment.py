"""The environment variables that an environment's code may see.

An environment is code of others, and its worker answers requests that may name any variable as a
key. So a worker starts with the few variables that programs need, the token of the run's data
routes, and what the source's `env_vars` set; nothing else of the caller's shell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

INFERENCE_TOKEN_VAR = "GRADUS_INFERENCE_TOKEN"
"""Variable that verifiers' client reads the bearer token from."""

_ALLOWED = frozenset(
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
        "TOKENIZERS_PARALLELISM",
        "OMP_NUM_THREADS",
        "DOCKER_HOST",
    }
)
_ALLOWED_PREFIXES = ("LC_",)


def child_environment(
    caller: Mapping[str, str], *, named: Iterable[str], inference_token: str | None
) -> dict[str, str]:
    """The variables of the pool's processes.

    `named` are the names of the source's own variables. None as token sets none: the model is
    then asked without one.
    """
    wanted = set(named) | _ALLOWED
    chosen = {
        name: value
        for name, value in caller.items()
        if name in wanted or name.startswith(_ALLOWED_PREFIXES)
    }
    # Telemetry of libraries stays off, whatever the caller's shell says.
    chosen.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", PYTHONUNBUFFERED="1")
    chosen.pop(INFERENCE_TOKEN_VAR, None)
    if inference_token is not None:
        chosen[INFERENCE_TOKEN_VAR] = inference_token
    return chosen

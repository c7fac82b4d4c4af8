"""The environment variables that an environment's code may see.

An environment is code of others, and its worker answers requests that may name any variable as a
key. So a worker starts with the few variables that programs need and what the source's `env_vars`
and `pass_env` name; nothing else of the caller's shell. Keys and tokens that the worker itself
needs reach it beside its environment, so that the programs that it starts do not inherit them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from gradus.config import PASSED_TO_EVERY_PROCESS
from gradus.processes.child import LAUNCH_VARIABLE

INFERENCE_TOKEN_VAR = "GRADUS_INFERENCE_TOKEN"
"""Variable that verifiers' client reads the bearer token from."""

HUB_TOKEN_VAR = "HF_TOKEN"

_ALLOWED = PASSED_TO_EVERY_PROCESS | {
    "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",
    "DOCKER_HOST",
    # The mark by which the launcher finds what an environment leaves running.
    LAUNCH_VARIABLE,
}
_ALLOWED_PREFIXES = ("LC_",)


def child_environment(caller: Mapping[str, str], *, named: Iterable[str]) -> dict[str, str]:
    """The variables of the pool's processes, which every program that they start inherits.

    `named` are the names of the source's own variables.
    """
    wanted = set(named) | _ALLOWED
    chosen = {
        name: value
        for name, value in caller.items()
        if name in wanted or name.startswith(_ALLOWED_PREFIXES)
    }
    # Telemetry of libraries stays off, whatever the caller's shell says.
    chosen.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", PYTHONUNBUFFERED="1")
    for name in (INFERENCE_TOKEN_VAR, HUB_TOKEN_VAR):
        chosen.pop(name, None)
    return chosen


def worker_secrets(
    caller: Mapping[str, str], *, keys: Iterable[str], inference_token: str | None
) -> dict[str, str]:
    """What a worker may read, and no program that it starts: see `hide_variables`.

    The token of the run's data routes, that of the hub for the tokenizer, and the `keys` of other
    endpoints. None as inference token sets none: the model is then asked without one.
    """
    names = {*keys, HUB_TOKEN_VAR} - {INFERENCE_TOKEN_VAR}
    secrets = {name: caller[name] for name in names if name in caller}
    if inference_token is not None:
        secrets[INFERENCE_TOKEN_VAR] = inference_token
    return secrets


def hide_variables(secrets: Mapping[str, str]) -> None:
    """Let code of this process read `secrets` in `os.environ`, and no process that it starts.

    They are found by name, and missing from what is inherited, listed and copied.
    """
    hidden = dict(secrets)
    plain: Any = type(os.environ)

    class HidingEnviron(plain):
        def __getitem__(self, name: str) -> Any:
            try:
                return super().__getitem__(name)
            except KeyError:
                if name in hidden:
                    return hidden[name]
                raise

        def __delitem__(self, name: str) -> None:
            if name in set(self) or name not in hidden:
                super().__delitem__(name)
            hidden.pop(name, None)

    for name in hidden:
        os.environ.pop(name, None)
    os.environ.__class__ = HidingEnviron

"""The environment variables that an environment's code may see.

An environment is code of others, and its worker answers requests that may name any variable as a
key. So a worker starts with the few variables that programs need, the token of the run's data
routes, and what the source's `env_vars` set; nothing else of the caller's shell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradus.config.environment_variables import PASSED_TO_EVERY_PROCESS
from gradus.death_watch import LAUNCH_VARIABLE

INFERENCE_TOKEN_VAR = "GRADUS_INFERENCE_TOKEN"
"""Variable that verifiers' client reads the bearer token from."""

_ALLOWED = PASSED_TO_EVERY_PROCESS | {
    "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",
    "DOCKER_HOST",
    # The mark by which the launcher finds what an environment leaves running.
    LAUNCH_VARIABLE,
}
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

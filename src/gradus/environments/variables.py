"""The variables that an environment may see.

An environment is foreign code, and its process answers requests that may name any variable as a
key. So it keeps the few variables that programs need and what the source's `env_vars` and
`pass_env` name; nothing else of the caller's shell. Keys and tokens that its own code needs lie
outside its environment, so that programs that it starts do not inherit them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from gradus.processes.child import LAUNCH_VARIABLE
from gradus.processes.secured import AUTHORITY_VARIABLE
from gradus.processes.started import PASSED_TO_EVERY_PROCESS
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE

HUB_TOKEN_VAR = "HF_TOKEN"

_ALLOWED = PASSED_TO_EVERY_PROCESS | {
    "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",
    "DOCKER_HOST",
    AUTHORITY_VARIABLE,
    # The mark by which the launcher finds what an environment leaves running.
    LAUNCH_VARIABLE,
}
_ALLOWED_PREFIXES = ("LC_",)


def child_environment(caller: Mapping[str, str], *, named: Iterable[str]) -> dict[str, str]:
    """The variables of an environment process, which every program that it starts inherits.

    `named` are the names of the source's own variables.
    """
    wanted = set(named) | _ALLOWED
    chosen = {
        name: value
        for name, value in caller.items()
        if name in wanted or name.startswith(_ALLOWED_PREFIXES)
    }
    # Libraries send no telemetry, even if the caller's shell allows it.
    chosen.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", PYTHONUNBUFFERED="1")
    for name in (INFERENCE_TOKEN_VARIABLE, HUB_TOKEN_VAR):
        chosen.pop(name, None)
    return chosen


def environment_secrets(
    caller: Mapping[str, str], *, keys: Iterable[str], inference_token: str | None
) -> dict[str, str]:
    """What its own code may read, and no program that it starts: see `hide_variables`.

    The token of the run's data routes, and the `keys` that the config names. Without an inference
    token none is set, and the model is asked without one.
    """
    names = {*keys} - {INFERENCE_TOKEN_VARIABLE}
    secrets = {name: caller[name] for name in names if name in caller}
    if inference_token is not None:
        secrets[INFERENCE_TOKEN_VARIABLE] = inference_token
    return secrets


def hide_variables(secrets: Mapping[str, str]) -> None:
    """Let code of this process read `secrets` in `os.environ`, and no process that it starts.

    A lookup by name finds them; they are neither inherited, nor listed, nor copied.
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

"""Settings of a program: its command and files, how it hears the task, what it may see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from gradus.errors import ConfigError

OWN_VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_MODEL"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"),
)
"""Where the program finds the model; no one else may set them."""
_HIDDEN_PREFIX = "GRADUS_"
_FALLBACK_PATH = "/usr/local/bin:/usr/bin:/bin"


class ProgramKeys(BaseModel):
    """The keys of a program; the config of the task set and that of the harness inherit them."""

    command: list[str] = Field(default_factory=list)
    """The program and its arguments, e.g. ["python", "agent.py"]; no shell reads it."""
    files: list[Path] = Field(default_factory=list)
    """Files and folders that are copied into the program's working folder before each episode."""
    input: Literal["stdin", "file"] = "stdin"
    """How the program gets the task: on its standard input, or in `task_file`."""
    task_file: str = "task.txt"
    """Name of that file in the working folder."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the program, with their values."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of variables that the program gets with their values; the source's own `pass_env` must
    name them too. Nothing else of your shell reaches it but PATH and LANG."""
    sampling: Literal["run", "program"] = "run"
    """Who says how calls that train are sampled: "run" counts the program's own wishes and does not
    follow them; "program" follows them, and answers 400 to those that it cannot."""
    max_output_bytes: int = Field(1_048_576, ge=1)
    """How much of its standard output, and of its errors, is kept; of more, the end."""

    @field_validator("command")
    @classmethod
    def _can_be_started(cls, command: list[str]) -> list[str]:
        if command and not command[0]:
            raise ValueError("must begin with the name of a program")
        if any("\0" in part for part in command):
            raise ValueError("must not hold the character NUL")
        return command

    @field_validator("task_file")
    @classmethod
    def _is_inside(cls, name: str) -> str:
        return inside(name)

    @field_validator("files")
    @classmethod
    def _have_names_of_their_own(cls, files: list[Path]) -> list[Path]:
        names = [file.name for file in files]
        for name in names:
            if name in ("", ".."):
                raise ValueError("must name files or folders, not '.' or '..'")
            if names.count(name) > 1:
                raise ValueError(f"two of them are named {name!r}; the working folder holds one")
        return files

    @field_validator("env", "pass_env")
    @classmethod
    def _are_free(cls, names: dict[str, str] | list[str]) -> dict[str, str] | list[str]:
        for name in names:
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"{name!r} is not a name of a variable")
            if name in OWN_VARIABLES or name.startswith(_HIDDEN_PREFIX):
                raise ValueError(f"{name} cannot be set: it belongs to gradus")
        return names


def inside(name: str) -> str:
    """The name of a file below the working folder; ValueError for one that leaves it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
        raise ValueError(f"{name!r} must be a path below the working folder")
    return name


def check_program(keys: ProgramKeys) -> None:
    """ConfigError for a program that cannot run here, whatever the task is."""
    if not keys.command:
        raise ConfigError('`command` is missing; write e.g. command = ["python", "agent.py"]')
    for file in keys.files:
        if not file.exists():
            raise ConfigError(
                f"files: there is no {file.absolute()}. A relative path starts where the command "
                "was given"
            )
    names = {file.name for file in keys.files}
    for part in keys.command:
        # Unlike Path.is_file, no error for a whole program in one argument, as after `python -c`.
        is_local = not Path(part).is_absolute() and os.path.isfile(part)
        if is_local and PurePosixPath(part).parts[0] not in names:
            raise ConfigError(
                f"command names {part!r}, which the program's own folder will not hold; add "
                f"files = [{str(Path(part).parts[0])!r}]"
            )
    _passed(keys, os.environ)


def _passed(keys: ProgramKeys, worker: Mapping[str, str]) -> dict[str, str]:
    """Values of the variables that are passed by name; ConfigError for one that is not there."""
    missing = [name for name in keys.pass_env if worker.get(name) is None]
    if missing:
        raise ConfigError(
            f"pass_env: the environment has no variable {missing[0]}; set it in your shell and "
            f'name it in the source too: pass_env = ["{missing[0]}"]'
        )
    return {name: worker[name] for name in keys.pass_env}


def program_environment(
    keys: ProgramKeys,
    worker: Mapping[str, str],
    *,
    home: str,
    model: Mapping[str, str],
    is_contained: bool = False,
) -> dict[str, str]:
    """Every variable of the program, and nothing else of the worker's.

    `model` says where the model is. A container has its own PATH and its own folder for
    temporary files.
    """
    made = {"HOME": home, "LANG": worker.get("LANG") or "C.UTF-8"}
    if not is_contained:
        made |= {"PATH": worker.get("PATH") or _FALLBACK_PATH, "TMPDIR": home}
    return {**made, **keys.env, **_passed(keys, worker), **model}

"""What is said when an environment cannot be loaded: whose fault it is, where, and what to do."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.loaders import env_config_type, taskset_config_type

from gradus.errors import ConfigError, EnvironmentFailure, GradusError, nearest

_OWN_KEYS = ("id", "taskset", "timeout", "retries")
"""Keys of an environment's config that gradus writes itself."""
_VERIFIERS = Path(vf.__file__).parent


class Stopped(SystemExit):
    """What a stop signal raises while an environment is loaded, apart from the code's own exits."""


def source_name(source: str, verifiers_config: Mapping[str, Any]) -> str:
    taskset = verifiers_config.get("taskset") or {}
    environment_id = verifiers_config.get("id") or taskset.get("id") or ""
    return f"source {source!r}: environment {environment_id!r}"


def config_type(verifiers_config: Mapping[str, Any]) -> type[vf.EnvConfig]:
    """The config class of an environment; imports its code."""
    taskset = verifiers_config.get("taskset") or {}
    found: type[vf.EnvConfig] = env_config_type(
        taskset.get("id") or "", verifiers_config.get("id") or ""
    )
    return found


def declared_roles(verifiers_config: Mapping[str, Any]) -> dict[str, AgentConfig]:
    """The roles that an environment declares, with what its author set for each."""
    return {
        name: field.default
        for name, field in config_type(verifiers_config).model_fields.items()
        if isinstance(field.default, AgentConfig)
    }


@contextlib.contextmanager
def explained(name: str, verifiers_config: Mapping[str, Any]) -> Iterator[None]:
    """Turns what is raised while an environment is loaded into an error for the user."""
    try:
        yield
    except ValidationError as error:
        text = _first_errors(error, verifiers_config)
        raise ConfigError(f"{name} refuses its settings: {text}") from error
    except ImportError as error:
        raise _missing_module(name, error) from error
    except (Stopped, GradusError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError | TypeError) and _is_raised_by_verifiers(error):
            text = " ".join(str(error).split())
            raise ConfigError(
                f"{name} refuses this configuration: {text} (what it calls --env.<role> is "
                "agents.<role> here)"
            ) from error
        raise EnvironmentFailure(
            f"{name} could not be loaded: {origin(error)}. Fix the environment's package, or "
            "leave the source out"
        ) from error


def _is_raised_by_verifiers(error: BaseException) -> bool:
    """Whether verifiers itself refused something, as against code of the environment's author."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _VERIFIERS in Path(frames[-1].filename).parents


def _missing_module(name: str, error: ImportError) -> ConfigError:
    missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    if not isinstance(missing, ModuleNotFoundError):
        return ConfigError(f"{name} cannot be imported: {origin(error)}. Fix its package")
    if f"(tried to import {missing.name!r})" in str(error):
        return ConfigError(
            f"{name} is not installed: there is no Python module {missing.name!r}. Install its "
            "package, or correct the id"
        )
    advice = "Install it" if error is missing else " ".join(str(error).split())
    return ConfigError(
        f"{name} needs the Python module {missing.name!r}, which is not installed. {advice}"
    )


def origin(error: BaseException) -> str:
    """What was raised and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split()) or "no message"
    if not frames:
        return f"{type(error).__name__}: {text}"
    return f"{type(error).__name__}: {text} ({frames[-1].filename}, line {frames[-1].lineno})"


def _first_errors(
    error: ValidationError, verifiers_config: Mapping[str, Any], limit: int = 3
) -> str:
    found = error.errors(include_url=False)
    texts = [_one_error(dict(entry), verifiers_config) for entry in found[:limit]]
    if len(found) > limit:
        texts.append(f"and {len(found) - limit} more")
    return "; ".join(texts)


def _one_error(entry: dict[str, Any], verifiers_config: Mapping[str, Any]) -> str:
    """One error with the key as the user wrote it, and the keys that may stand there."""
    loc: tuple[Any, ...] = entry["loc"]
    where = ".".join(str(part) for part in loc)
    if entry["type"] == "missing":
        return f"{where} is missing"
    if entry["type"] != "extra_forbidden" or len(loc) > 2:
        return f"{where}: {entry['msg']}" if where else str(entry["msg"])
    if len(loc) == 2 and loc[0] == "taskset":
        known = list(taskset_config_type(verifiers_config["taskset"]["id"]).model_fields)
        known = [key for key in known if key != "id"]
        return f"{where} is not a key of this taskset; {hint(loc[1], known)}"
    if len(loc) == 1:
        roles = declared_roles(verifiers_config)
        fields = set(config_type(verifiers_config).model_fields) - {*roles, *_OWN_KEYS}
        return f"{where} is not a setting of this environment; {hint(where, sorted(fields))}"
    return f"{where}: no such key"


def hint(name: str, known: list[str], what: str = "it takes") -> str:
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"{what}: {', '.join(known) or 'none'}"

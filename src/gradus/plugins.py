"""A plug-in is a class named by a registered name or by "package.module:Class"."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from gradus.errors import ConfigError


def find_plugin(kind: str, name: str, registry: Mapping[str, str | type]) -> type:
    """The class that `name` stands for; refuses unknown names with the list of known ones.

    `registry` maps registered names to classes, or to "module:Class" strings where importing
    the class is expensive.

        >>> find_plugin("loss", "dppo", {"dppo": "gradus.trainer.losses.trust_region:Dppo"})
    """
    target = registry.get(name, name)
    if isinstance(target, type):
        return target
    module_name, separator, class_name = target.partition(":")
    if not separator:
        known = ", ".join(sorted(registry))
        raise ConfigError(
            f"{kind} {name!r} is not known. Use one of: {known}; "
            "or your own as 'package.module:Class'"
        )
    found = getattr(_import(kind, name, module_name), class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no class {class_name!r}")
    return found


def describe(kind: str, plugin: object) -> str:
    """The kind of a plug-in and its class, for messages.

    >>> describe("loss", "text")
    'loss builtins:str'
    """
    found = type(plugin)
    return f"{kind} {found.__module__}:{found.__qualname__}"


def find_function(kind: str, path: str) -> Callable[..., Any]:
    """The function that "package.module:function" names; refuses everything else."""
    module_name, separator, function_name = path.partition(":")
    if not separator:
        raise ConfigError(f"{kind} {path!r} must be given as 'package.module:function'")
    found = getattr(_import(kind, path, module_name), function_name, None)
    if not callable(found):
        raise ConfigError(
            f"{kind} {path!r}: module {module_name!r} has no function {function_name!r}"
        )
    return cast("Callable[..., Any]", found)


def plain_state(owner: str, state: object) -> dict[str, Any]:
    """A copy of `state()` as JSON values, which later changes of the plug-in do not reach.

    Numbers and arrays of numpy become Python's. ConfigError, with the name of `owner` and the place
    in the state, for everything that `load_state` would not get back as it was.

        >>> plain_state("curriculum 'words'", {"rates": (0.5, 1.0)})
        {'rates': [0.5, 1.0]}
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state() of {owner} gives {type(state).__name__}; it must give a dict")
    try:
        return {key: _plain(value, key) for key, value in _text_keys(state, "")}
    except _NotPlain as error:
        raise ConfigError(
            f"state() of {owner} {error}; a checkpoint keeps finite numbers, text, true, false, "
            "None, and lists and dicts of them"
        ) from None
    except RecursionError as error:
        raise ConfigError(f"state() of {owner} is nested too deep, or contains itself") from error


class _NotPlain(Exception):
    """What is wrong with a value, and where it stands."""


def _plain(value: Any, where: str) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise _NotPlain(f"holds {value} at {where!r}")
            return float(value)
        case str():
            return _text(value, where)
        case list() | tuple():
            return [_plain(part, f"{where}[{number}]") for number, part in enumerate(value)]
        case Mapping():
            return {key: _plain(part, f"{where}.{key}") for key, part in _text_keys(value, where)}
    raise _NotPlain(f"holds a {type(value).__name__} at {where!r}")


def _text_keys(state: Mapping[Any, Any], where: str) -> list[tuple[str, Any]]:
    """JSON would turn a key that is a number into text, and `load_state` would miss it."""
    for key in state:
        if not isinstance(key, str):
            place = f" at {where!r}" if where else ""
            raise _NotPlain(f"holds the key {key!r}{place}, which is no text")
    return [(_text(key, where), value) for key, value in state.items()]


def _text(value: str, where: str) -> str:
    try:
        return value.encode().decode()
    except UnicodeEncodeError:
        raise _NotPlain(f"holds text that is not Unicode at {where!r}") from None


def _import(kind: str, name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} {name!r}: cannot import {module_name!r} ({error}). Install it or fix the path"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{kind} {name!r}: {module_name!r} fails when it is imported "
            f"({type(error).__name__}: {error}). Fix the module"
        ) from error

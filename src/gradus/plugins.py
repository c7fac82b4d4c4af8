"""A plug-in is a class named by a registered name or by "package.module:Class"."""

from __future__ import annotations

import importlib
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

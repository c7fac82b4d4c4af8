"""A plug-in is a class named by a registered name or by "package.module:Class"."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

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
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} {name!r}: cannot import {module_name!r} ({error}). Install it or fix the path"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no class {class_name!r}")
    return found

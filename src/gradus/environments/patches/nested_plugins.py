"""Ids that name a module inside a package, such as `my_agents.play.shell`."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from verifiers.v1.utils import loaders

from gradus.installed import plugin_module


def import_nested_plugins() -> None:
    """Import such a module by its path; verifiers looks for it among its own packages and fails."""
    import_plugin = loaders._import_plugin
    if hasattr(import_plugin, "is_nested"):
        return

    @functools.wraps(import_plugin)
    def import_nested(plugin_id: str, kind: str, group: str) -> ModuleType:
        module = plugin_module(plugin_id)
        if "." not in module:
            found: ModuleType = import_plugin(plugin_id, kind, group)
            return found
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            text = f"{kind} {plugin_id!r} not found (tried to import {module!r})"
            raise ModuleNotFoundError(text) from error

    import_nested.is_nested = True  # type: ignore[attr-defined]
    loaders._import_plugin = import_nested

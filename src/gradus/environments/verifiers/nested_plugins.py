"""Ids that name a module inside a package, such as `my_agents.play.shell`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from verifiers.v1.utils import loaders

from gradus.environments.verifiers.patch import wrap
from gradus.installed import plugin_module


def import_nested_plugins() -> None:
    """Import such a module by its path; verifiers would search only its own packages."""

    def nested(import_plugin: Any) -> Any:
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

        return import_nested

    wrap(loaders, "_import_plugin", nested)

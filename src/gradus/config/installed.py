"""Whether a module or a verifiers plug-in is installed, found out without importing it."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

BUILTIN_TASKSETS = "tasksets"
BUILTIN_ENVIRONMENTS = "envs"
BUILTIN_HARNESSES = "harnesses"


def has_module(name: str) -> bool:
    """Whether `import name` would find a module; parents are not imported either."""
    path: Sequence[str] = ["", *sys.path]
    walked: list[str] = []
    spec: ModuleSpec | None = None
    for part in name.split("."):
        walked.append(part)
        spec = PathFinder.find_spec(".".join(walked), path) or _other_finder(walked)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or [])
    return spec is not None


def _other_finder(walked: list[str]) -> ModuleSpec | None:
    """Top-level modules that an installer announces by a finder of its own."""
    try:
        return importlib.util.find_spec(walked[0]) if len(walked) == 1 else None
    except (ImportError, ValueError):
        return None


def plugin_module(plugin_id: str) -> str:
    """The module that verifiers imports for an id.

    >>> plugin_module("someone/reverse-text@1.2")
    'reverse_text'
    """
    return plugin_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def builtin_plugins(kind: str) -> list[str]:
    """The plug-ins of one kind that ship with verifiers."""
    spec = PathFinder.find_spec("verifiers", ["", *sys.path]) or _other_finder(["verifiers"])
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0]) / "v1" / kind
    modules = pkgutil.iter_modules([str(folder)])
    return sorted(module.name for module in modules if module.ispkg and module.name != "utils")


def has_plugin(plugin_id: str, kinds: Sequence[str]) -> bool:
    """Whether verifiers would find a plug-in: among its own of these kinds, or as a module."""
    module = plugin_module(plugin_id)
    if any(module in builtin_plugins(kind) for kind in kinds):
        return True
    return module.isidentifier() and has_module(module)

"""Repair a small repository in a container: a bug report, a shell, and checks of what it does then.

Its module `bugs` can be imported without verifiers, so the classes are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ShellHarness", "SweSandboxTaskset"]

_MODULES = {"ShellHarness": "shell", "SweSandboxTaskset": "taskset"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"gradus_swe_sandbox.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

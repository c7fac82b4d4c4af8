"""Existing agents as they are: a command for each task, its model calls recorded and trained.

Its module `settings` can be imported without verifiers, so the classes are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ProgramHarness", "ProgramTaskset"]

_MODULES = {"ProgramHarness": "harness", "ProgramTaskset": "taskset"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"gradus_program.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

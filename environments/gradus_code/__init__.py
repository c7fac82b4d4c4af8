"""Write a Python program; it is run in a sandbox on inputs whose answers it never sees.

The module `problems` can be imported without verifiers, so the taskset is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CodeTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_code.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

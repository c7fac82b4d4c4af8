"""Write a Python program that is right, and short."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CodeGolfTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_code_golf.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Count the circles in drawn images: the smallest task for a model that reads images.

Its module `drawing` can be imported without verifiers, so environment and taskset are loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ShapesEnv", "ShapesTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_shapes.environment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

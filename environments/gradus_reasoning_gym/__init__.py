"""The seeded generators of the package `reasoning-gym`, each with its own scorer.

Its modules `generators` and `safety` can be imported without verifiers, so the taskset is loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ReasoningGymTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_reasoning_gym.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

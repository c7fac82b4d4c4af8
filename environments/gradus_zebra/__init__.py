"""Who lives in which house: zebra puzzles of reasoning-gym, each checked by a solver of our own.

Its modules `solver` and `puzzles` can be imported without verifiers, so the taskset is loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ZebraTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_zebra.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

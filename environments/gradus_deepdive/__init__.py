"""Long searches: questions whose answer is three to five articles away, over the same library.

The taskset is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["DeepDiveTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_deepdive.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Walk from one article to another by clicking links.

Its modules `graph` and `walk` can be imported without verifiers, so the taskset is loaded on first
use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["WikispeediaTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_wikispeedia.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Any file of JSON lines as tasks, and any function as their reward: no package to write.

Its modules `rows` and `answers` can be imported without verifiers, so the taskset is loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["JsonlTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_jsonl.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Multiple-choice questions with a reward for the right letter.

Its module `reward` can be imported without verifiers; the taskset is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["GpqaRlvrTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_gpqa_rlvr.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

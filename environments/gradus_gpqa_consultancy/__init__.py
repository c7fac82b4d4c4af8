"""Multiple-choice questions for which one consultant argues for the answer that it was assigned."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["GpqaConsultancyEnv", "GpqaConsultancyTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_gpqa_consultancy.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Answer short questions in a required format: one lowercase word and nothing else.

Its module `questions` can be imported without verifiers, so the taskset itself is loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["RequiredFormatTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_required_format.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Look a word up with a tool, and answer with what the tool says.

Its module `entries` can be imported without verifiers, so the taskset is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["WordLookupTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_word_lookup.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

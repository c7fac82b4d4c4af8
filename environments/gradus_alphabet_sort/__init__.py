"""Keep a list of names sorted while a user adds names, turn by turn.

Its modules `names` and `rules` can be imported without verifiers, so environment and taskset are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_alphabet_sort.environment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Guess a hidden word; every guess is answered with marks for its letters.

Its modules `words` and `rules` can be imported without verifiers, so environment and taskset are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["WordleEnv", "WordleTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_wordle.environment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

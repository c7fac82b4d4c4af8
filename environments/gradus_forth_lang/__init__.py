"""A Forth that no model knows by heart: read its documentation, run code, submit a word.

The language and its problems can be used without verifiers, so the taskset is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ForthLangTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_forth_lang.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

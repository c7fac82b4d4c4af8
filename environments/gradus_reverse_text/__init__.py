"""Reverse a text: the reply is compared with the reversed prompt, character by character.

Its modules `words` and `texts` can be imported without verifiers, so the taskset
itself is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ReverseTextTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_reverse_text.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

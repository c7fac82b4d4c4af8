"""Questions about made-up words, which a glossary explains.

Its module `entries` can be imported without verifiers, so the taskset is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["GlossaryTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_glossary.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

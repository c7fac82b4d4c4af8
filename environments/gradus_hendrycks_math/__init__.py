r"""Competition mathematics: seven subjects, five levels, an answer in `\boxed{}`.

Its modules `problems` and `reading` can be imported without verifiers, so the taskset is loaded on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["HendrycksMathTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_hendrycks_math.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

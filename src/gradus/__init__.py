"""gradus trains language-model agents with asynchronous reinforcement learning.

From Python: `load_run(path)` reads a run, `train(config)` does one. Both are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradus.companions import hide_misfits

if TYPE_CHECKING:
    from gradus.launch.python_api import LoadedRun, RunCheckpoint, load_run, train

__version__ = "0.1.0"
__all__ = ["LoadedRun", "RunCheckpoint", "__version__", "load_run", "train"]

hide_misfits()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus.launch.python_api"), name)
    raise AttributeError(f"module 'gradus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

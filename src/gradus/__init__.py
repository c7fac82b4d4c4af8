"""gradus trains language-model agents with asynchronous reinforcement learning.

From Python: `train`, `sft`, `evaluate` and `generate` do runs, `load_run(path)` reads one. They are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradus.companions import hide_misfits

if TYPE_CHECKING:
    from gradus.launch.from_python.calls import RunInterrupted, evaluate, generate, sft, train
    from gradus.launch.from_python.loaded_run import LoadedRun, RunCheckpoint, load_run

__version__ = "0.1.0"
__all__ = [
    "LoadedRun",
    "RunCheckpoint",
    "RunInterrupted",
    "__version__",
    "evaluate",
    "generate",
    "load_run",
    "sft",
    "train",
]
_READING = {"LoadedRun", "RunCheckpoint", "load_run"}

hide_misfits()


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "loaded_run" if name in _READING else "calls"
        return getattr(importlib.import_module(f"gradus.launch.from_python.{module}"), name)
    raise AttributeError(f"module 'gradus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

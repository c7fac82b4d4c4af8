"""Multiple-choice questions that two debaters argue about before a judge."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"DebateEnv": "gradus_debate", "GpqaDebateTaskset": "gradus_gpqa_debate.taskset"}
__all__ = ["DebateEnv", "GpqaDebateTaskset"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

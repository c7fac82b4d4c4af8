"""Debate: several members argue over a question, and a judge decides.

Other packages build on it: they export `DebateEnv` beside a taskset of their own whose tasks hold
`DebateData`. The questions can be made without verifiers, so everything is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DebateEnv": "environment",
    "DebateEnvConfig": "settings",
    "DebateData": "taskset",
    "DebateTask": "taskset",
    "DebateTaskset": "taskset",
    "DebateTasksetConfig": "taskset",
}
__all__ = [
    "DebateData",
    "DebateEnv",
    "DebateEnvConfig",
    "DebateTask",
    "DebateTaskset",
    "DebateTasksetConfig",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gradus_debate.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

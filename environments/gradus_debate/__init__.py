"""Debate: several members argue over a question, and a judge decides.

Other packages build on it: they export `DebateEnv` beside a taskset of their own whose tasks hold
`DebateData`.
"""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = [
    "DebateData",
    "DebateEnv",
    "DebateEnvConfig",
    "DebateTask",
    "DebateTaskset",
    "DebateTasksetConfig",
]
__getattr__ = on_first_use(
    __name__,
    taskset=["DebateData", "DebateTask", "DebateTaskset", "DebateTasksetConfig"],
    environment=["DebateEnv"],
    settings=["DebateEnvConfig"],
)

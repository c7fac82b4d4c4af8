"""Jobs for an agent with a shell: look through files in a container and write the answer down.

Its module `jobs` can be imported without verifiers, so the classes are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["GeneralAgentHarness", "GeneralAgentTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_general_agent.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

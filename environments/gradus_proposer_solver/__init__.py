"""A proposer invents problems for solvers, and gains most where half of them fail.

Its module `rules` can be imported without verifiers; the rest is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_proposer_solver.environment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

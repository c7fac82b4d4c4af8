"""A proposer invents problems for solvers, and gains most where half of them fail."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]
__getattr__ = on_first_use(__name__, environment=["ProposerSolverEnv", "ProposerSolverTaskset"])

"""Add numbers with a tool."""

from __future__ import annotations

from gradus.testing.environment import SumTaskset

__all__ = ["SumTaskset"]

"""Add numbers with a tool."""

from __future__ import annotations

from echo_tasksets import SumTaskset

__all__ = ["SumTaskset"]

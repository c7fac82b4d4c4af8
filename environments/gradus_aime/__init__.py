"""Competition problems whose answer is a whole number from 0 to 999."""

from __future__ import annotations

from gradus_aime.taskset import AimeTaskset

__all__ = ["AimeTaskset"]

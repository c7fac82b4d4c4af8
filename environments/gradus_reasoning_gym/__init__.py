"""The seeded generators of the package `reasoning-gym`, each with its own scorer."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ReasoningGymTaskset"]
__getattr__ = on_first_use(__name__, taskset=["ReasoningGymTaskset"])

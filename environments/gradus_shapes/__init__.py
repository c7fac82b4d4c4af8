"""Count the circles in drawn images: the smallest task for a model that reads images."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ShapesEnv", "ShapesTaskset"]
__getattr__ = on_first_use(__name__, environment=["ShapesEnv", "ShapesTaskset"])

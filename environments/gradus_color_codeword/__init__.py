"""Read a word off coloured squares that are shown turn by turn: a test of images over turns."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ColorCodewordEnv", "ColorCodewordTaskset"]
__getattr__ = on_first_use(__name__, environment=["ColorCodewordEnv", "ColorCodewordTaskset"])

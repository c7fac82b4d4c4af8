"""Write a Python program that is right, and short."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["CodeGolfTaskset"]
__getattr__ = on_first_use(__name__, taskset=["CodeGolfTaskset"])

"""Any file of JSON lines as tasks, and any function as their reward: no package to write."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["JsonlTaskset"]
__getattr__ = on_first_use(__name__, taskset=["JsonlTaskset"])

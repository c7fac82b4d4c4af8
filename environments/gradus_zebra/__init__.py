"""Who lives in which house: zebra puzzles of reasoning-gym, each checked by a solver of our own."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ZebraTaskset"]
__getattr__ = on_first_use(__name__, taskset=["ZebraTaskset"])

"""Multiple-choice questions with a reward for the right letter."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["GpqaRlvrTaskset"]
__getattr__ = on_first_use(__name__, taskset=["GpqaRlvrTaskset"])

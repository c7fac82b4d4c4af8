"""Multiple-choice questions for which one consultant argues for the answer that it was assigned."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["GpqaConsultancyEnv", "GpqaConsultancyTaskset"]
__getattr__ = on_first_use(__name__, taskset=["GpqaConsultancyEnv", "GpqaConsultancyTaskset"])

"""Answer short questions in a required format: one lowercase word and nothing else."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["RequiredFormatTaskset"]
__getattr__ = on_first_use(__name__, taskset=["RequiredFormatTaskset"])

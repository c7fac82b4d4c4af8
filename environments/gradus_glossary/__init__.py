"""Questions about made-up words, which a glossary explains."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["GlossaryTaskset"]
__getattr__ = on_first_use(__name__, taskset=["GlossaryTaskset"])

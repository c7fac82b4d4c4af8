r"""Competition mathematics: seven subjects, five levels, an answer in `\boxed{}`."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["HendrycksMathTaskset"]
__getattr__ = on_first_use(__name__, taskset=["HendrycksMathTaskset"])

"""Search a small encyclopedia, read its articles, and answer questions that need several."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["WikiSearchTaskset"]
__getattr__ = on_first_use(__name__, taskset=["WikiSearchTaskset"])

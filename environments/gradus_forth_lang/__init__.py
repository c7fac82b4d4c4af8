"""A Forth that no model knows by heart: read its documentation, run code, submit a word."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ForthLangTaskset"]
__getattr__ = on_first_use(__name__, taskset=["ForthLangTaskset"])

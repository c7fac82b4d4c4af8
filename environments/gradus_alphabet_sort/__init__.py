"""Keep a list of names sorted while a user adds names, turn by turn."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
__getattr__ = on_first_use(__name__, environment=["AlphabetSortEnv", "AlphabetSortTaskset"])

"""Look a word up with a tool, and answer with what the tool says."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["WordLookupTaskset"]
__getattr__ = on_first_use(__name__, taskset=["WordLookupTaskset"])

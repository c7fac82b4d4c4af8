"""Long searches: questions whose answer is three to five articles away, over the same library."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["DeepDiveTaskset"]
__getattr__ = on_first_use(__name__, taskset=["DeepDiveTaskset"])

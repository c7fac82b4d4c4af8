"""Walk from one article to another by clicking links."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["WikispeediaTaskset"]
__getattr__ = on_first_use(__name__, taskset=["WikispeediaTaskset"])

"""Write a Python program; it is run in a sandbox on inputs whose answers it never sees."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["CodeTaskset"]
__getattr__ = on_first_use(__name__, taskset=["CodeTaskset"])

"""Reverse a text: the reply is compared with the reversed prompt, character by character."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ReverseTextTaskset"]
__getattr__ = on_first_use(__name__, taskset=["ReverseTextTaskset"])

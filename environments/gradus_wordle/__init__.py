"""Guess a hidden word; every guess is answered with marks for its letters."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["WordleEnv", "WordleTaskset"]
__getattr__ = on_first_use(__name__, environment=["WordleEnv", "WordleTaskset"])

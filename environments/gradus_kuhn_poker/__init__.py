"""Kuhn poker in self-play: three cards, one bet, two players who are both the policy.

Its module `game` can be imported without verifiers, so environment and taskset are loaded on first
use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_kuhn_poker.environment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

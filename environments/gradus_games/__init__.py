"""Games of two players from textarena: TicTacToe, Nim, ConnectFour and SimpleNegotiation.

Importing it needs neither verifiers nor textarena; both are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["GamesEnv", "GamesTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_games.environment"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

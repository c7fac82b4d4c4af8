"""Games of two players from textarena: TicTacToe, Nim, ConnectFour and SimpleNegotiation."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["GamesEnv", "GamesTaskset"]
__getattr__ = on_first_use(__name__, environment=["GamesEnv", "GamesTaskset"])

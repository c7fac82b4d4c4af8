"""Kuhn poker in self-play: three cards, one bet, two players who are both the policy."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]
__getattr__ = on_first_use(__name__, environment=["KuhnPokerEnv", "KuhnPokerTaskset"])

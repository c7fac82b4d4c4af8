"""The rules of Kuhn poker, pure.

Each player antes one chip and holds one of three cards. A player may check or bet one chip; against
a bet, fold or call. After check-check or a call the higher card takes the pot.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

CARDS = "JQK"
"""From the lowest to the highest."""
PASS, BET = "p", "b"
"""Check or fold; bet or call."""
DEALS = tuple("".join(cards) for cards in itertools.permutations(CARDS, 2))
"""All six deals: the card of the first player, then that of the second."""

_CHIPS = {"pp": 1, "bp": 1, "bb": 2, "pbp": 1, "pbb": 2}
"""Finished histories of moves and what the loser pays."""
_BET_SHARE = {"J": 0.35, "Q": 0.5, "K": 0.65}
"""How often the demonstrations bet or call with each card."""
_FOLDED_BY = {"bp": 1, "pbp": 0}


@dataclass(frozen=True)
class Game:
    """One game: the deal and the moves so far.

    >>> Game("KJ").play("b").play("p").payoffs
    (1, -1)
    """

    deal: str
    history: str = ""

    @property
    def is_over(self) -> bool:
        return self.history in _CHIPS

    @property
    def player(self) -> int:
        """Who moves now: 0 or 1."""
        return len(self.history) % 2

    def play(self, move: str) -> Game:
        """The game after a move; ValueError for a move that there is not."""
        if self.is_over or move not in (PASS, BET):
            raise ValueError(f"move {move!r} is not possible after {self.history!r}")
        return Game(self.deal, self.history + move)

    @property
    def payoffs(self) -> tuple[int, int]:
        """Chips won by the first and the second player; they add up to 0."""
        if not self.is_over:
            raise ValueError(f"the game is not over after {self.history!r}")
        loser = _FOLDED_BY.get(self.history)
        if loser is None:
            first, second = (CARDS.index(card) for card in self.deal)
            loser = 0 if first < second else 1
        chips = _CHIPS[self.history]
        return (-chips, chips) if loser == 0 else (chips, -chips)

    def forfeit(self) -> tuple[int, int]:
        """Payoffs when the player to move makes no legal move: the largest loss."""
        return (-2, 2) if self.player == 0 else (2, -2)


def observation(game: Game) -> str:
    """Tell the player to move the own card and all moves.

    >>> observation(Game("KJ", "p"))
    'J p'
    """
    return f"{game.deal[game.player]} {game.history}".strip()


def is_clear(game: Game) -> bool:
    """Tell whether the player to move has one move that is never worse: K or J against a bet."""
    return game.history.endswith(BET) and game.deal[game.player] != "Q"


def is_mistake(game: Game, move: str) -> bool:
    """Tell whether a move of a clear decision gives chips away: folding K, calling with J."""
    return is_clear(game) and (move == PASS) == (game.deal[game.player] == "K")


def demonstrations(num: int, *, seed: int) -> list[list[tuple[str, str]]]:
    """Turns of poor play, one player's (observation, move) pairs per conversation.

    They show the format, and hardly a strategy: higher cards bet a little more often, so that a
    model has a reason to look at its card.
    """
    draw = random.Random(seed)
    shown: list[list[tuple[str, str]]] = []
    while len(shown) < num:
        game = Game(draw.choice(DEALS))
        turns: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
        while not game.is_over:
            move = BET if draw.random() < _BET_SHARE[game.deal[game.player]] else PASS
            turns[game.player].append((observation(game), move))
            game = game.play(move)
        shown.extend(turn for turn in turns if turn)
    return shown[:num]

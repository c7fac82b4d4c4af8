"""How good a way of playing Kuhn poker is, computed exactly over all deals and moves (pure).

Self-play tells nothing by its rewards, which add up to 0. These numbers do: what a player wins
against a fixed opponent, and what a perfect opponent wins against it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradus_kuhn_poker.game import BET, CARDS, DEALS, PASS, Game, observation


@dataclass(frozen=True)
class Move:
    """How often a player passes and bets at one observation; otherwise it forfeits."""

    passes: float
    bets: float


Strategy = Mapping[str, Move]
"""One way of playing: a move for every observation of both seats."""

_HISTORIES = (("", "pb"), ("p", "b"))
"""Per seat, the moves before each of its decisions."""
OBSERVATIONS = tuple(
    tuple(f"{card} {history}".strip() for card in CARDS for history in histories)
    for histories in _HISTORIES
)
"""Everything that the first and the second player can be told."""
RANDOM = Move(0.5, 0.5)
RANDOM_STRATEGY: Strategy = dict.fromkeys((*OBSERVATIONS[0], *OBSERVATIONS[1]), RANDOM)


def estimate_strategy(moves: Iterable[tuple[str, str]]) -> Strategy:
    """The frequencies among (observation, reply) pairs; random where nothing was observed."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for seen, reply in moves:
        counts[seen][reply.strip()] += 1
    played = {
        seen: Move(replies[PASS] / replies.total(), replies[BET] / replies.total())
        for seen, replies in counts.items()
    }
    return {**RANDOM_STRATEGY, **played}


def expected_chips(first: Strategy, second: Strategy) -> float:
    """What the first player wins per game on average over the deals, in chips."""
    return sum(_expected(Game(deal), (first, second)) for deal in DEALS) / len(DEALS)


def chips_against(strategy: Strategy, opponent: Strategy) -> float:
    """Chips won per game against an opponent, the mean of both seats; 0 against itself."""
    as_first = expected_chips(strategy, opponent)
    as_second = -expected_chips(opponent, strategy)
    return (as_first + as_second) / 2


def exploitability(strategy: Strategy) -> float:
    """Chips per game that the best opponent wins, the mean of both seats; 0 at an equilibrium.

    >>> round(exploitability(RANDOM_STRATEGY), 4)
    0.4583
    """
    as_first = max(expected_chips(answer, strategy) for answer in _pure_strategies(seat=0))
    as_second = max(-expected_chips(strategy, answer) for answer in _pure_strategies(seat=1))
    return (as_first + as_second) / 2


def _pure_strategies(*, seat: int) -> Iterable[Strategy]:
    """All 64 ways to play one seat without chance."""
    seen = OBSERVATIONS[seat]
    for moves in itertools.product((Move(1.0, 0.0), Move(0.0, 1.0)), repeat=len(seen)):
        yield dict(zip(seen, moves, strict=True))


def _expected(game: Game, players: tuple[Strategy, Strategy]) -> float:
    if game.is_over:
        return game.payoffs[0]
    move = players[game.player][observation(game)]
    forfeits = 1.0 - move.passes - move.bets
    parts = (
        (move.passes, lambda: _expected(game.play(PASS), players)),
        (move.bets, lambda: _expected(game.play(BET), players)),
        (forfeits, lambda: float(game.forfeit()[0])),
    )
    return sum(share * value() for share, value in parts if share > 0)

"""One game of textarena, played by two who send texts.

textarena draws from the random state of the process, so a game is seeded and reset in one call
that waits for nothing, and the state of everybody else is put back.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from gradus.errors import ConfigError
from gradus_kit.multiagent.answers import without_reasoning

GameName = Literal["TicTacToe", "Nim", "ConnectFour", "SimpleNegotiation"]
GAMES: tuple[GameName, ...] = get_args(GameName)
NEGOTIATION: GameName = "SimpleNegotiation"
NEGOTIATION_TURNS = 10
"""Turns of a negotiation unless the config says otherwise; the engine compares gains at its end."""
MAX_TALK_CHARS = 2000
"""Of a reply in a negotiation; what is beyond is not delivered. The engine's own pattern for offers
takes longer than the square of its text."""
_MOVE = re.compile(r"\[(?:col )?[0-9][0-9 ]{0,15}\]", re.IGNORECASE | re.ASCII)
_WORDS = "PLAYER_ACTION"
_BOARD = "GAME_BOARD"


@dataclass(frozen=True)
class Outcome:
    """How a game ended."""

    rewards: tuple[float, float]
    """Of both players, between -1 and 1; they add up to 0."""
    loser_by_fault: int | None
    """Who lost by an illegal move or by not answering; None when neither did."""
    reason: str
    """In the engine's words, or ours."""


class Match:
    """One game from its start to its outcome.

    >>> match = Match("Nim", seed=1)  # doctest: +SKIP
    >>> match.play("[0 3]")  # doctest: +SKIP
    >>> match.player  # doctest: +SKIP
    1
    """

    def __init__(
        self, game: GameName, *, seed: int, opening_moves: int = 0, max_turns: int | None = None
    ) -> None:
        """Set up the board; `opening_moves` legal moves of the seed are played before anyone is
        asked. After `max_turns` moves of both the game is a draw; a negotiation is then counted."""
        self._game = game
        self.num_turns = 0
        self.outcome: Outcome | None = None
        self._talks = game == NEGOTIATION
        self._max_turns = max_turns
        options = {"max_turns": max_turns or NEGOTIATION_TURNS} if self._talks else {}
        arena = _arena()
        state_of_others = random.getstate()
        try:
            random.seed(f"{game} {seed}")
            self._engine = arena.make(f"{game}-v0-raw", **options)
            self._engine.reset(num_players=2)
        finally:
            random.setstate(state_of_others)
        self._engine.state.error_allowance = 0
        if self._talks:
            # The engine asks whether the turns are over before it counts the turn.
            self._engine.state.max_turns -= 1
        draw = random.Random(f"opening {game} {seed}")
        for _ in range(opening_moves):
            self._engine.step(draw.choice(_LEGAL[game](self._engine.state.game_state)))

    @property
    def player(self) -> int:
        """Who moves now: 0 or 1."""
        return int(self._engine.state.current_player_id)

    def observation(self) -> str:
        """What the player who moves now has not been told yet: rules, moves and the latest board.

        A negotiation delivers the other's words too; a board game only what the engine says.
        """
        player, messages = self._engine.get_observation()
        boards = [i for i, (_, _, kind) in enumerate(messages) if kind.name == _BOARD]
        texts = []
        for place, (author, text, kind) in enumerate(messages):
            if kind.name == _WORDS and (not self._talks or author == player):
                continue
            if kind.name == _BOARD and place != boards[-1]:
                continue
            texts.append(f"Player {author} says: {text}" if kind.name == _WORDS else text.strip())
        return "\n\n".join(texts)

    def play(self, reply: str) -> None:
        """Make the move that a reply ends with; an illegal one, or none, loses."""
        player = self.player
        self._engine.step(self._move(reply))
        self.num_turns += 1
        state = self._engine.state
        if state.done:
            is_fault = bool(state.game_info[player]["invalid_move"])
            rewards = float(state.rewards[0]), float(state.rewards[1])
            reason = str(state.game_info[player].get("reason"))
            self.outcome = Outcome(rewards, player if is_fault else None, reason)
        elif not self._talks and self._max_turns is not None and self.num_turns >= self._max_turns:
            self.outcome = Outcome((0.0, 0.0), None, f"a draw after {self._max_turns} turns")

    def legal_reply(self) -> str:
        """A move that the rules allow now; words without an offer in a negotiation."""
        if self._talks:
            return "What do you offer?"
        return _LEGAL[self._game](self._engine.state.game_state)[0]

    def forfeit(self) -> None:
        """End the game: the player who moves now does not answer, and loses."""
        loser = self.player
        rewards = (-1.0, 1.0) if loser == 0 else (1.0, -1.0)
        self.outcome = Outcome(rewards, loser, f"Player {loser} did not answer")

    def _move(self, reply: str) -> str:
        """The part of a reply that the engine reads, on one line and without endless runs."""
        public = without_reasoning(reply).encode("utf-8", "replace").decode()
        if self._talks:
            # Runs of spaces or dots would make the engine's patterns try every way to share them.
            return re.sub(r"\.{2,}", ".", " ".join(public[:MAX_TALK_CHARS].split()))
        moves = _MOVE.findall(" ".join(public.split()))
        return moves[-1] if moves else ""


def _arena() -> ModuleType:
    try:
        return importlib.import_module("textarena")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the games need the package `textarena`; install gradus with its extra: "
            "pip install 'gradus-rl[tasks]'"
        ) from error


def _legal_cells(state: dict[str, Any]) -> list[str]:
    cells = [cell for row in state["board"] for cell in row]
    return [f"[{i}]" for i, cell in enumerate(cells) if not cell]


def _legal_columns(state: dict[str, Any]) -> list[str]:
    return [f"[col {i}]" for i, cell in enumerate(state["board"][0]) if cell == "."]


def _legal_takes(state: dict[str, Any]) -> list[str]:
    # One object at a time, so that an opening of a few moves leaves something to take.
    return [f"[{i} 1]" for i, pile in enumerate(state["piles"]) if pile]


_LEGAL: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "TicTacToe": _legal_cells,
    "ConnectFour": _legal_columns,
    "Nim": _legal_takes,
}

"""The environment `games`: two seats, `first` and `second`, and zero-sum rewards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus_games.match import NEGOTIATION, GameName, Match, Outcome
from gradus_kit.multiagent.seats import check_learner_seat, draw_learner_seat, stable_hash

SEATS = ("first", "second")
INSTRUCTION = (
    "You play a game against another player. End each reply with your move in square brackets, in "
    "the form that the rules give. A move that the rules do not allow loses the game."
)


class GamesConfig(vf.TasksetConfig):
    """Which game, how many of it, and who learns."""

    game: GameName = "TicTacToe"
    """The game; all of them run offline."""
    num_tasks: int = Field(64, ge=1)
    """Number of games to play, each with a different seed."""
    seed: int = 0
    """Seed of all games; each gets its own from it."""
    opening_moves: int = Field(0, ge=0, le=4)
    """Random legal moves of both before the players are asked, so that games begin differently. A
    negotiation has none: its goods are drawn anyway."""
    max_turns: int | None = Field(None, ge=1, le=200)
    """Most moves of both together; then the game is a draw. None means as long as the game goes; a
    negotiation has 10 turns, after which the gains are compared."""
    learner_seat: str | None = None
    """Which seat learns: `bernoulli`, `round_robin`, `hash`, or the name of a seat. None means
    both."""
    instruction: str | None = INSTRUCTION
    """System prompt. None means that the players see only what the game says."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_learner_seat(self.learner_seat, SEATS)
        if self.game == NEGOTIATION and self.opening_moves:
            raise ValueError(f"opening_moves = {self.opening_moves}: a negotiation has none")
        return self


class GamesData(vf.TaskData):
    """One game. The players are told the rules by the environment, never by the task."""

    game: GameName
    """The game."""
    seed: int
    """Seed of its start."""
    opening_moves: int
    """Moves before the players are asked."""
    max_turns: int | None
    """Most moves of both."""
    learner_seat: str | None
    """The seat that learns; None means both."""


class GamesTask(vf.Task[GamesData, vf.State, vf.TaskConfig]):
    """One game; the environment rewards both players at its end."""

    def gold_replies(self) -> dict[str, list[str]]:
        """Legal moves of both to the end, the first there are; the seed's own game is played."""
        data = self.data
        match = Match(
            data.game, seed=data.seed, opening_moves=data.opening_moves, max_turns=data.max_turns
        )
        replies: dict[str, list[str]] = {seat: [] for seat in SEATS}
        while match.outcome is None:
            reply = match.legal_reply()
            replies[SEATS[match.player]].append(reply)
            match.play(reply)
        return replies


class GamesTaskset(vf.Taskset[GamesTask, GamesConfig]):
    """Games of one kind, each with its own seed."""

    def load(self) -> Iterable[GamesTask]:
        """Yield the games in the order of their seeds."""
        config = self.config
        for index in range(config.num_tasks):
            # Sums would give neighbouring seeds nearly the same games.
            seed = stable_hash(f"game {config.seed} {index}") % 2**31
            data = GamesData(
                name=f"{config.game}-{seed}",
                system_prompt=config.instruction,
                game=config.game,
                seed=seed,
                opening_moves=config.opening_moves,
                max_turns=config.max_turns,
                learner_seat=draw_learner_seat(
                    config.learner_seat,
                    SEATS,
                    seed=config.seed,
                    task_key=f"{config.game}-{seed}",
                    task_index=index,
                ),
            )
            yield GamesTask(data, config.task)


class GamesEnvConfig(vf.EnvConfig):
    """Both seats; a seat that is not configured is played by the policy."""

    first: vf.AgentConfig = vf.AgentConfig()
    """Player 0, who moves first unless the opening has an odd number of moves."""
    second: vf.AgentConfig = vf.AgentConfig()
    """Player 1."""


class GamesEnv(vf.Env[GamesEnvConfig]):
    """Plays one game; each player is told what happened since the own last move."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Ask the player to move until the game is over.

        A player who was never asked, because the other lost at once, has a trace without turns only
        where it is the one that learns; else it has none.
        """
        data = task.data
        match = Match(
            data.game, seed=data.seed, opening_moves=data.opening_moves, max_turns=data.max_turns
        )
        talks: dict[int, vf.Interaction] = {}
        turns = [0, 0]

        async def seat(player: int, stack: AsyncExitStack) -> vf.Interaction:
            if player not in talks:
                agent = getattr(agents, SEATS[player])
                agent.trainable &= data.learner_seat in (None, SEATS[player])
                talks[player] = await stack.enter_async_context(agent.interaction(task))
                talks[player].trace.info["seat"] = SEATS[player]
            return talks[player]

        async with AsyncExitStack() as stack:
            if data.learner_seat is not None:
                await seat(SEATS.index(data.learner_seat), stack)
            while match.outcome is None:
                player = match.player
                talk = await seat(player, stack)
                segment = await talk.turn(match.observation())
                if segment.terminated:
                    match.forfeit()
                else:
                    turns[player] += 1
                    match.play(segment.last_reply)
        if all(talk.trace.ok for talk in talks.values()):
            for player, talk in talks.items():
                _record(talk.trace, player, match.outcome, turns[player])


def _record(trace: vf.Trace, player: int, outcome: Outcome, turns: int) -> None:
    trace.record_reward("outcome", outcome.rewards[player])
    trace.record_metric("won", float(outcome.rewards[player] > 0))
    trace.record_metric("drawn", float(outcome.rewards[player] == 0))
    trace.record_metric("illegal_or_no_move", float(outcome.loser_by_fault == player))
    trace.record_metric("moves", float(turns))
    trace.info["reason"] = outcome.reason

"""The environment `kuhn-poker`: two seats, `first` and `second`, and zero-sum rewards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from pydantic import Field

from gradus_kuhn_poker.game import BET, DEALS, PASS, Game, is_clear, is_mistake, observation

SEATS = ("first", "second")


class KuhnPokerConfig(vf.TasksetConfig):
    """How many games, and what the players are told."""

    num_tasks: int = Field(6, ge=1)
    """Number of tasks; the six deals in turn."""
    instruction: str | None = None
    """System prompt. None means that the players see only card and moves, like `K pb`."""


class KuhnPokerData(vf.TaskData):
    """One deal. The players are told their own card by the environment, never the task."""

    deal: str
    """The card of the first player, then that of the second."""


class KuhnPokerTask(vf.Task[KuhnPokerData, vf.State, vf.TaskConfig]):
    """One game; the environment rewards both players at its end."""

    def gold_replies(self) -> dict[str, list[str]]:
        """Legal moves to the end: the king bets and calls, the others check and fold."""
        return {
            seat: [BET if card == "K" else PASS] * 2
            for seat, card in zip(SEATS, self.data.deal, strict=True)
        }


class KuhnPokerTaskset(vf.Taskset[KuhnPokerTask, KuhnPokerConfig]):
    """All deals, again and again."""

    def load(self) -> Iterable[KuhnPokerTask]:
        """Yield the deals in turn."""
        for number in range(self.config.num_tasks):
            deal = DEALS[number % len(DEALS)]
            data = KuhnPokerData(name=deal, deal=deal, system_prompt=self.config.instruction)
            yield KuhnPokerTask(data, self.config.task)


class KuhnPokerEnvConfig(vf.EnvConfig):
    """Both seats; a seat that is not configured is played by the policy."""

    first: vf.AgentConfig = vf.AgentConfig()
    """The player who moves first."""
    second: vf.AgentConfig = vf.AgentConfig()
    """The player who answers."""


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    """Plays one game; each player sees the own card and all moves, and answers with one letter."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Ask the player to move until the game is over or somebody forfeits it.

        A player who never moved, because the other forfeited at once, gets no trace.
        """
        game = Game(task.data.deal)
        is_forfeit = False
        talks: dict[int, vf.Interaction] = {}
        clear, mistakes = [0, 0], [0, 0]
        async with AsyncExitStack() as stack:
            while not game.is_over and not is_forfeit:
                player = game.player
                if player not in talks:
                    agent = getattr(agents, SEATS[player])
                    talks[player] = await stack.enter_async_context(agent.interaction(task))
                segment = await talks[player].turn(observation(game))
                move = "" if segment.terminated else segment.last_reply.strip()
                is_forfeit = move not in (PASS, BET)
                clear[player] += is_clear(game)
                mistakes[player] += is_forfeit or is_mistake(game, move)
                game = game if is_forfeit else game.play(move)
        payoffs = game.forfeit() if is_forfeit else game.payoffs
        for player, talk in talks.items():
            # At most two chips change hands, so that rewards lie in [-1, 1].
            talk.trace.record_reward("chips", payoffs[player] / 2)
            talk.trace.record_metric("forfeit", float(is_forfeit and player == game.player))
            talk.trace.record_metric("clear_decisions", float(clear[player]))
            talk.trace.record_metric("mistakes", float(mistakes[player]))

"""The rules of Kuhn poker, and how the environment plays them."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gradus_kuhn_poker.environment import (
    KuhnPokerConfig,
    KuhnPokerEnv,
    KuhnPokerEnvConfig,
    KuhnPokerTaskset,
)
from gradus_kuhn_poker.game import DEALS, Game, demonstrations, observation


@pytest.mark.parametrize(
    ("deal", "history", "first"),
    [
        ("KJ", "pp", 1),
        ("JQ", "pp", -1),
        ("JK", "bp", 1),
        ("KQ", "pbp", -1),
        ("KQ", "pbb", 2),
        ("QK", "bb", -2),
    ],
)
def test_the_pot_goes_to_the_higher_card_unless_somebody_folds(
    deal: str, history: str, first: int
) -> None:
    game = Game(deal)
    for move in history:
        assert not game.is_over
        game = game.play(move)
    assert game.is_over
    assert game.payoffs == (first, -first)


@pytest.mark.parametrize(("history", "move"), [("", "x"), ("", ""), ("pp", "p"), ("", "pb")])
def test_a_move_that_there_is_not_is_refused(history: str, move: str) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        Game("KJ", history).play(move)


def test_an_unfinished_game_has_no_payoffs() -> None:
    with pytest.raises(ValueError, match="is not over"):
        Game("KJ", "p").payoffs  # noqa: B018 - reading it is what fails


def test_a_player_sees_the_own_card_and_all_moves() -> None:
    assert observation(Game("KJ")) == "K"
    assert observation(Game("KJ", "p")) == "J p"
    assert observation(Game("KJ", "pb")) == "K pb"


def test_a_forfeit_is_the_largest_loss_of_the_player_to_move() -> None:
    assert Game("KJ").forfeit() == (-2, 2)
    assert Game("KJ", "b").forfeit() == (2, -2)


def test_demonstrations_are_legal_repeatable_and_poor() -> None:
    shown = demonstrations(400, seed=1)
    assert shown == demonstrations(400, seed=1)
    assert len(shown) == 400
    moves = Counter(move for turns in shown for _, move in turns)
    assert set(moves) == {"p", "b"}
    assert 0.8 < moves["p"] / moves["b"] < 1.25
    with_king = Counter(move for turns in shown for seen, move in turns if seen == "K b")
    assert 0.15 < with_king["p"] / with_king.total() < 0.55


def test_the_six_deals_come_in_turn() -> None:
    taskset = KuhnPokerTaskset(KuhnPokerConfig(id="gradus-kuhn-poker", num_tasks=8))
    assert [task.data.deal for task in taskset] == [*DEALS, *DEALS[:2]]


class Talk:
    """A player who says the moves of a script, and a trace that keeps what is recorded."""

    def __init__(self, script: list[str | None]) -> None:
        self.heard: list[str] = []
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.trace = SimpleNamespace(
            record_reward=self.rewards.__setitem__, record_metric=self.metrics.__setitem__
        )
        self._script = script

    async def turn(self, message: str) -> SimpleNamespace:
        self.heard.append(message)
        reply = self._script.pop(0)
        return SimpleNamespace(terminated=reply is None, last_reply=reply or "")


async def play(deal: str, first: list[str | None], second: list[str | None]) -> tuple[Talk, Talk]:
    """One game by script; None ends a player's rollout."""
    talks = (Talk(first), Talk(second))

    def agent(talk: Talk) -> SimpleNamespace:
        @asynccontextmanager
        async def interaction(task: Any) -> Any:
            yield talk

        return SimpleNamespace(interaction=interaction)

    config = KuhnPokerEnvConfig.model_validate({"taskset": {"id": "gradus-kuhn-poker"}})
    task = SimpleNamespace(data=SimpleNamespace(deal=deal))
    agents: Any = SimpleNamespace(first=agent(talks[0]), second=agent(talks[1]))
    environment = object.__new__(KuhnPokerEnv)
    environment.config = config
    await environment.run(task, agents)
    return talks


@pytest.mark.parametrize("deal", DEALS)
async def test_the_replies_that_the_check_plays_are_legal_and_won_by_the_king(deal: str) -> None:
    tasks = KuhnPokerTaskset(KuhnPokerConfig(id="gradus-kuhn-poker"))
    (task,) = [task for task in tasks if task.data.deal == deal]
    gold = task.gold_replies()
    first, second = await play(deal, list(gold["first"]), list(gold["second"]))
    metrics = [talk.metrics.get("forfeit", 0.0) for talk in (first, second)]
    assert metrics == [0.0, 0.0]
    if "K" in deal:
        assert (first, second)[deal.index("K")].rewards["chips"] > 0


async def test_a_game_tells_each_player_the_own_card_and_rewards_sum_to_zero() -> None:
    first, second = await play("QK", ["p", " b\n"], ["b"])
    assert first.heard == ["Q", "Q pb"]
    assert second.heard == ["K p"]
    assert (first.rewards, second.rewards) == ({"chips": -1.0}, {"chips": 1.0})
    assert first.metrics == {"forfeit": 0.0, "clear_decisions": 0.0, "mistakes": 0.0}
    assert second.metrics == first.metrics


async def test_folding_the_best_card_and_calling_with_the_worst_are_mistakes() -> None:
    first, second = await play("KJ", ["p", "p"], ["b"])
    assert (first.metrics["clear_decisions"], first.metrics["mistakes"]) == (1.0, 1.0)
    assert second.metrics["mistakes"] == 0.0
    _, second = await play("KJ", ["b"], ["b"])
    assert (second.metrics["clear_decisions"], second.metrics["mistakes"]) == (1.0, 1.0)
    _, second = await play("KQ", ["b"], ["b"])
    assert (second.metrics["clear_decisions"], second.metrics["mistakes"]) == (0.0, 0.0)


@pytest.mark.parametrize("reply", ["call", "", None])
async def test_a_player_without_a_legal_move_forfeits(reply: str | None) -> None:
    first, second = await play("KJ", ["b"], [reply])
    assert (first.rewards["chips"], second.rewards["chips"]) == (1.0, -1.0)
    assert (first.metrics["forfeit"], second.metrics["forfeit"]) == (0.0, 1.0)
    assert second.metrics["mistakes"] == 1.0


async def test_a_player_who_never_moved_has_no_reward() -> None:
    first, second = await play("KJ", ["?"], [])
    assert first.rewards == {"chips": -1.0}
    assert second.rewards == {}

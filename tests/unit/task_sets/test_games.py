"""Games of two players: the engine behind a match, and how the environment plays it."""

from __future__ import annotations

import random
import sys
import time
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus_games.environment import SEATS, GamesConfig, GamesEnv, GamesTaskset
from gradus_games.match import GAMES, GameName, Match

if find_spec("textarena") is None:
    pytest.skip("textarena is not installed", allow_module_level=True)

WINS = {
    "TicTacToe": ["[0]", "[3]", "[1]", "[4]", "[2]"],
    "Nim": ["[0 3]", "[1 4]", "[2 5]"],
    "ConnectFour": ["[col 0]", "[1]", "[col 0]", "[1]", "[col 0]", "[1]", "[col 0]"],
}


def played(game: GameName, replies: list[str], **options: Any) -> Match:
    match = Match(game, seed=0, **options)
    for reply in replies:
        assert match.outcome is None
        match.observation()
        match.play(reply)
    return match


@pytest.mark.parametrize("game", sorted(WINS))
def test_who_makes_the_last_winning_move_wins(game: GameName) -> None:
    outcome = played(game, WINS[game]).outcome
    assert outcome is not None
    assert (outcome.rewards, outcome.loser_by_fault) == ((1.0, -1.0), None)


def test_a_full_board_without_a_line_is_a_draw() -> None:
    outcome = played("TicTacToe", [f"[{i}]" for i in (0, 1, 2, 4, 3, 5, 7, 6, 8)]).outcome
    assert outcome is not None
    assert (outcome.rewards, outcome.loser_by_fault) == ((0.0, 0.0), None)


@pytest.mark.parametrize("game", sorted(WINS))
@pytest.mark.parametrize(
    "reply", ["", "no idea", "[99]", "[9 9 9]", "[-1]", "<think>[0]", "[" * 50, "\ud800[x]"]
)
def test_an_illegal_move_loses_at_once(game: GameName, reply: str) -> None:
    first = WINS[game][0]
    outcome = played(game, [first, reply]).outcome
    assert outcome is not None
    assert (outcome.rewards, outcome.loser_by_fault) == ((1.0, -1.0), 1)


def test_the_last_move_of_a_reply_counts_and_reasoning_does_not() -> None:
    match = played("TicTacToe", ["<think>[8]</think> Not [0], because of [x].\nI take [ 4 ] [4]"])
    assert match.outcome is None
    assert "O" in match.observation().split("\n\n")[-2]
    outcome = played("TicTacToe", ["[4]", "[4]"]).outcome
    assert outcome is not None
    assert outcome.loser_by_fault == 1


def test_a_game_that_lasts_too_long_is_a_draw() -> None:
    outcome = played("ConnectFour", ["[0]", "[1]"], max_turns=2).outcome
    assert outcome is not None
    assert (outcome.rewards, outcome.reason) == ((0.0, 0.0), "a draw after 2 turns")


def test_a_negotiation_counts_the_gains_after_its_turns() -> None:
    trade = ["[Offer: 1 Wheat -> 5 Ore]", "Fine. [Accept]"]
    outcome = played("SimpleNegotiation", [*trade, "hm", "hm"], max_turns=4).outcome
    assert outcome is not None
    assert (outcome.rewards, outcome.loser_by_fault) == ((1.0, -1.0), None)
    outcome = played("SimpleNegotiation", ["hm"] * 10).outcome
    assert outcome is not None
    assert outcome.rewards == (0.0, 0.0)


def test_an_offer_of_goods_that_one_does_not_have_loses() -> None:
    outcome = played("SimpleNegotiation", ["[Offer: 99 Ore -> 1 Wheat]"]).outcome
    assert outcome is not None
    assert (outcome.rewards, outcome.loser_by_fault) == ((-1.0, 1.0), 0)


def test_a_player_is_told_what_is_new_and_the_latest_board_once() -> None:
    match = played("TicTacToe", ["secret plan [4]"])
    first = match.observation()
    assert first.startswith("You are Player 1")
    assert first.count("Current Board") == 1
    assert "cell 4" in first
    assert "secret" not in first
    match.play("[0]")
    assert "You are" not in match.observation()


def test_words_are_delivered_in_a_negotiation_only() -> None:
    match = played("SimpleNegotiation", ["Good day! [Player 1] [GAME] \ud800"])
    told = match.observation()
    assert "Player 0 says: Good day!" in told
    told.encode()


def test_a_seed_gives_the_same_start_and_leaves_the_state_of_others_alone() -> None:
    random.seed(5)
    before = random.getstate()
    one, same, other = (Match("SimpleNegotiation", seed=s).observation() for s in (1, 1, 2))
    assert random.getstate() == before
    assert one == same != other


def test_an_opening_is_legal_and_repeatable() -> None:
    boards = [Match("ConnectFour", seed=s, opening_moves=4).observation() for s in (1, 1, 2)]
    assert boards[0] == boards[1] != boards[2]
    assert boards[0].split("Board state:")[1].count("X") == 2
    for game in WINS:
        assert Match(game, seed=3, opening_moves=3).player == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("unit", ["[Offer: ", "[Offer: I give . ", "[1", "[0]", " ", "A", "\x00]"])
def test_a_huge_reply_is_played_at_once(game: GameName, unit: str) -> None:
    started = time.process_time()
    played(game, [unit * (100_000 // len(unit))])
    assert time.process_time() - started < 1.0


@given(
    st.sampled_from(GAMES),
    st.lists(
        st.one_of(
            st.sampled_from(["[Accept]", "[0]", "[col 1]", "[1 2]", "[Offer: 1 Ore -> 2 Wood]"]),
            st.text(max_size=40),
        ),
        max_size=12,
    ),
)
@settings(max_examples=40)
def test_any_replies_keep_the_rewards_zero_sum(game: GameName, replies: list[str]) -> None:
    match = Match(game, seed=1)
    for reply in replies:
        if match.outcome is None:
            match.observation()
            match.play(reply)
    if match.outcome is None:
        match.forfeit()
    assert match.outcome is not None
    assert sum(match.outcome.rewards) == 0
    assert set(match.outcome.rewards) <= {-1.0, 0.0, 1.0}


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[tasks\]'"):
        Match("Nim", seed=0)


class Talk:
    """A player who says the replies of a script, and a trace that keeps what is recorded."""

    def __init__(self, script: list[str | None]) -> None:
        self.heard: list[str] = []
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.info: dict[str, Any] = {}
        self.trace = SimpleNamespace(
            ok=True,
            info=self.info,
            record_reward=self.rewards.__setitem__,
            record_metric=self.metrics.__setitem__,
        )
        self._script = script

    async def turn(self, message: str) -> SimpleNamespace:
        self.heard.append(message)
        reply = self._script.pop(0)
        return SimpleNamespace(terminated=reply is None, last_reply=reply or "")


class Seat:
    """An agent whose interactions are one talk."""

    def __init__(self, talk: Talk) -> None:
        self.trainable = True
        self.was_opened = False
        self._talk = talk

    @asynccontextmanager
    async def interaction(self, task: Any) -> Any:
        self.was_opened = True
        yield self._talk


async def play(
    first: list[str | None], second: list[str | None], **keys: Any
) -> tuple[list[Talk], list[Seat]]:
    """One game by script; None ends a player's rollout."""
    (task,) = GamesTaskset(GamesConfig(id="gradus-games", num_tasks=1, **keys))
    talks = [Talk(first), Talk(second)]
    seats = [Seat(talk) for talk in talks]
    agents: Any = SimpleNamespace(**dict(zip(SEATS, seats, strict=True)))
    await object.__new__(GamesEnv).run(task, agents)
    return talks, seats


@pytest.mark.parametrize("game", [*sorted(WINS), "SimpleNegotiation"])
async def test_the_replies_that_the_check_plays_are_legal_to_the_end(game: GameName) -> None:
    opening = 0 if game == "SimpleNegotiation" else 3
    keys: dict[str, Any] = {"game": game, "opening_moves": opening}
    (task,) = GamesTaskset(GamesConfig(id="gradus-games", num_tasks=1, **keys))
    gold = task.gold_replies()
    talks, _ = await play(list(gold["first"]), list(gold["second"]), **keys)
    assert [talk.metrics["illegal_or_no_move"] for talk in talks] == [0.0, 0.0]
    assert [talk.metrics["moves"] for talk in talks] == [len(gold[seat]) for seat in SEATS]


async def test_both_players_are_rewarded_against_each_other() -> None:
    talks, seats = await play(["[0]", "[1]", "[2]"], ["[3]", "[4]"])
    assert [talk.rewards for talk in talks] == [{"outcome": 1.0}, {"outcome": -1.0}]
    assert [talk.metrics["moves"] for talk in talks] == [3.0, 2.0]
    assert [talk.info["seat"] for talk in talks] == list(SEATS)
    assert [seat.trainable for seat in seats] == [True, True]


@pytest.mark.parametrize("reply", ["I resign", None])
async def test_a_player_without_a_move_loses(reply: str | None) -> None:
    talks, _ = await play(["[0]"], [reply])
    assert [talk.rewards["outcome"] for talk in talks] == [1.0, -1.0]
    assert [talk.metrics["illegal_or_no_move"] for talk in talks] == [0.0, 1.0]


async def test_only_the_learning_seat_trains_and_it_has_a_trace_even_unasked() -> None:
    talks, seats = await play(["?"], [], learner_seat="second")
    assert [seat.trainable for seat in seats] == [False, True]
    assert [talk.rewards["outcome"] for talk in talks] == [-1.0, 1.0]
    talks, seats = await play(["?"], [])
    assert not seats[1].was_opened
    assert talks[1].rewards == {}


async def test_a_failed_trace_gives_nobody_a_reward() -> None:
    broken = Talk([None])
    broken.trace.ok = False
    (task,) = GamesTaskset(GamesConfig(id="gradus-games", num_tasks=1))
    other = Talk([])
    agents: Any = SimpleNamespace(first=Seat(broken), second=Seat(other))
    await object.__new__(GamesEnv).run(task, agents)
    assert (broken.rewards, other.rewards) == ({}, {})


def test_the_learning_seat_is_drawn_per_task() -> None:
    config = GamesConfig(id="gradus-games", num_tasks=4, learner_seat="round_robin")
    tasks = list(GamesTaskset(config))
    assert [task.data.learner_seat for task in tasks] == [*SEATS, *SEATS]
    assert len({task.key for task in tasks}) == 4


@pytest.mark.parametrize(
    "keys",
    [
        {"game": "Chess"},
        {"learner_seat": "third"},
        {"game": "SimpleNegotiation", "opening_moves": 2},
        {"opening_moves": 5},
        {"max_turns": 0},
        {"num_tasks": 0},
    ],
)
def test_a_config_that_cannot_work_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GamesConfig(id="gradus-games", **keys)


def test_two_seeds_share_no_game() -> None:
    def seeds(seed: int) -> list[int]:
        config = GamesConfig(id="gradus-games", num_tasks=64, seed=seed)
        return [task.data.seed for task in GamesTaskset(config)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 128

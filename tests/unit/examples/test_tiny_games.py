"""The warm-ups of `examples/recipes/tiny.py` show what their runs play."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gradus_alphabet_sort.environment import AlphabetSortConfig, AlphabetSortTaskset
from gradus_alphabet_sort.rules import TINY
from gradus_wordle.environment import WordleConfig, WordleTaskset

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
pytestmark = pytest.mark.torch


@pytest.fixture
def games(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(RECIPES))
    # It puts the folder of the reward curve on the path.
    monkeypatch.setattr(sys, "path", [*sys.path])
    found: dict[str, Any] = __import__("tiny").GAMES
    return found


def taskset(game: str) -> dict[str, Any]:
    config = tomllib.loads((RECIPES / f"{game}_tiny" / "rl.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = config["orchestrator"]["train"]["env"][0]["taskset"]
    return found


def test_the_words_of_the_warm_up_are_those_of_the_games(games: dict[str, Any]) -> None:
    tasks = list(WordleTaskset(WordleConfig(id="wordle", **taskset("wordle"))))
    shown = games["wordle"].demonstrations(400, seed=0)
    assert {guess for turns in shown for _, guess in turns} == {t.data.answer for t in tasks}
    assert max(map(len, shown)) == tasks[0].data.max_turns


def test_the_lists_of_the_warm_up_have_the_shape_of_the_tasks(games: dict[str, Any]) -> None:
    config = AlphabetSortConfig(id="alphabet-sort", num_tasks=20, **taskset("alphabet_sort"))
    assert config.shape == TINY
    tasks = list(AlphabetSortTaskset(config))
    shown = games["alphabet_sort"].demonstrations(20, seed=0)
    assert {len(t.data.user_turns) for t in tasks} == {len(turns) for turns in shown} == {2}

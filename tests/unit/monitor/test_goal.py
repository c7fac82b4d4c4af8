"""When a run may end before its last step, told from its records alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from gradus.errors import GoodEnd, SolvedError, StalledError
from gradus.monitor import Goal

REWARD = "episode/reward/mean"


def goal(target: float | None = None, patience: int | None = None, **more: Any) -> Goal:
    return Goal(target=target, patience_steps=patience, **{"is_evaluated": False, **more})


def evaluated(target: float | None = None, patience: int | None = None, **more: Any) -> Goal:
    return goal(target, patience, is_evaluated=True, **more)


def played(found: Goal, rewards: Iterable[float], name: str = REWARD) -> int | None:
    """The step at which the run ends."""
    for step, reward in enumerate(rewards):
        found.note({name: float(reward)}, step)
        if found.end is not None:
            return step
    return None


def measured(found: Goal, averages: dict[int, float], name: str = "eval/avg@4") -> GoodEnd | None:
    for version, average in averages.items():
        found.note({"eval/version": float(version), name: average}, version)
    return found.end


def test_ten_steps_must_reach_the_target_on_average() -> None:
    found = goal(0.9)
    assert played(found, [0.0] * 5 + [1.0] * 20) == 13, "a 0 and nine 1 make 0.9"
    assert isinstance(found.end, SolvedError)
    assert str(found.end) == (
        "reward 0.9 on average over the last 10 steps, and target_reward is 0.9"
    )
    assert played(goal(0.9), [1.0] * 9) is None
    assert played(goal(-0.5), [-0.4] * 10) == 9
    assert played(goal(), [1.0] * 50) is None, "nothing was asked for"


def test_a_reward_that_no_longer_rises_is_stalled_and_a_rising_one_is_not() -> None:
    noise = 0.05 * np.random.default_rng(0).standard_normal(100)
    found = goal(patience=20)
    end = played(found, np.minimum(np.arange(100) / 40, 1.0) + noise)
    assert end is not None
    assert end >= 55, "it rose until step 40"
    assert isinstance(found.end, StalledError)
    assert "no clear rise in 20 steps: reward " in str(found.end)
    assert played(goal(patience=20), np.arange(100) / 40 + noise) is None
    assert played(goal(patience=20), 1 - np.arange(100) / 100 + noise) == 39, "it falls"
    assert played(goal(patience=10), [0.5] * 30) == 19, "without any noise"
    higher = [0.4, 0.6] * 5 + [0.42, 0.6, 0.4, 0.62, 0.38, 0.6, 0.44, 0.6, 0.4, 0.6]
    assert played(goal(patience=10), higher) == 19, "a little more, and no more than noise"


def test_all_sources_must_reach_the_target_and_one_that_rises_is_enough_to_go_on() -> None:
    one, other = "episode/a/reward/mean", "episode/b/reward/mean"
    found = goal(0.9, 10)
    for step in range(40):
        found.note({REWARD: 0.95, one: 1.0, other: step / 50 + 0.001 * (step % 2)}, step)
    assert found.end is None
    for step in range(40, 60):
        found.note({REWARD: 1.0, one: 1.0, other: 0.95}, step)
    assert str(found.end).startswith("a 1, b 0.914 on average")


def test_a_source_that_is_not_in_every_step_counts_by_its_last_numbers() -> None:
    one, other = "episode/a/reward/mean", "episode/b/reward/mean"

    def mixed(found: Goal, of_other: float, *, every: int, first: int = 0) -> int | None:
        for step in range(400):
            rare = {other: of_other} if step >= first and (step - first) % every == 0 else {}
            shares = {"episode/tokens/trained/share": 1.0, "episode/a/tokens/trained/share": 1.0}
            found.note({REWARD: 0.95, one: 0.95} | shares | rare, step)
            if found.end is not None:
                return step
        return None

    assert mixed(goal(0.9), 0.0, every=20) is None, "b earns nothing"
    assert mixed(goal(0.9), 0.95, every=20) == 180, "the tenth number of b"
    assert mixed(goal(0.9, num_sources=2), 0.95, every=1, first=50) == 59, "b came late"
    assert mixed(goal(patience=20), 0.0, every=10) == 190, "the twentieth number of b"


def test_an_agent_that_trained_once_counts_to_the_end() -> None:
    name = "episode/go/agent/black"
    found = goal(0.9)
    found.note({f"{name}/reward/mean": 1.0, f"{name}/trained/share": 1.0}, 0)
    for step in range(1, 10):
        found.note({f"{name}/reward/mean": 1.0, f"{name}/trained/share": 0.0}, step)
    assert str(found.end).startswith("black 1 on average")


@pytest.mark.parametrize("name", ["eval/avg@4", "eval/avg"])
def test_the_evaluation_decides_where_there_is_one(name: str) -> None:
    found = evaluated(0.9)
    assert played(found, [1.0] * 50) is None, "the training reward does not count"
    end = measured(found, {20: 0.89, 40: 0.9 - 1e-12}, name)
    assert str(end) == "the evaluation of version 40 earned 0.9, and target_reward is 0.9"
    own = evaluated(0.9)
    assert measured(own, {20: 1.0}, "eval/words/avg@4") is None, "one environment is not all"


def test_no_better_evaluation_for_the_patience_is_stalled_and_a_tie_is_not_better() -> None:
    assert measured(evaluated(patience=40), {0: 0.5, 20: 0.6, 40: 0.5}) is None
    end = measured(evaluated(patience=40), {0: 0.5, 20: 0.6, 40: 0.5, 60: 0.6})
    assert isinstance(end, StalledError)
    assert "version 20 (0.6) for 40 steps, and patience_steps is 40" in str(end)
    assert measured(evaluated(patience=40), {0: 0.5, 20: 0.6, 40: 0.5, 60: 0.61}) is None


@pytest.mark.parametrize("share", ["eval/words/error/share", "eval/error/share"])
def test_an_evaluation_with_many_failed_episodes_ends_nothing(share: str) -> None:
    found = evaluated(0.9, 40)
    for version, failed in ((0, 0.05), (20, 0.06), (60, 0.5)):
        average = 0.5 if version == 0 else 1.0 if version == 20 else 0.1
        found.note({"eval/version": 1.0 * version, "eval/avg@4": average, share: failed}, version)
    assert found.end is None
    found.note({"eval/version": 80.0, "eval/avg@4": 0.9, share: 0.05}, 80)
    assert isinstance(found.end, SolvedError)


def test_an_evaluation_without_an_average_is_told_once_and_ends_nothing() -> None:
    told: list[str] = []
    found = evaluated(0.1, 20, tell=told.append)
    assert measured(found, dict.fromkeys(range(0, 100, 20), 1.0), "eval/duel/avg@1") is None
    assert [line.partition(" has")[0] for line in told] == ["the evaluation of version 0"]
    assert measured(found, {100: float("nan")}) is None


def test_the_first_end_stays_whatever_comes_later() -> None:
    found = evaluated(0.9)
    first = measured(found, {20: 0.95})
    assert measured(found, {40: 0.1}) is first
    assert played(goal(0.5), [float("nan"), *[0.6] * 10]) == 10

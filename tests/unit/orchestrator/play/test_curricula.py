"""Which task comes next: the uniform order, and pools by solve rate."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from configs import build_curriculum_config
from hypothesis import given
from hypothesis import strategies as st

from gradus.config import DifficultyConfig
from gradus.errors import ConfigError
from gradus.orchestrator.play.curriculum import (
    Difficulty,
    Ending,
    TaskResult,
    Uniform,
    build_curriculum,
)


class Backwards(Uniform):
    """A user's own curriculum, named by "module:Class"."""


def play(tasks: Difficulty, rates: dict[int, float], number: int) -> Counter[int]:
    """Draw and play, each task with its own solve rate; how often each was drawn."""
    drawn: Counter[int] = Counter()
    for _ in range(number):
        index = tasks.next_task().index
        drawn[index] += 1
        tasks.record(index, TaskResult(rewards=(rates[index],)))
    return drawn


def test_uniform_is_the_shuffled_order_of_each_pass() -> None:
    tasks = Uniform(30, seed="3/words")
    for pass_number in range(3):
        expected = list(range(30))
        random.Random(f"3/words/{pass_number}").shuffle(expected)
        assert [tasks.next_task().index for _ in range(30)] == expected


def test_uniform_counts_an_endless_source() -> None:
    tasks = Uniform(None, seed="0/sums")
    assert [tasks.next_task().index for _ in range(3)] == [0, 1, 2]


def test_a_task_moves_to_the_pool_of_its_solve_rate() -> None:
    tasks = Difficulty(3, seed="0/words", config=DifficultyConfig())
    for index, reward in ((0, 1.0), (1, 0.5), (2, 0.0)):
        tasks.record(index, TaskResult(rewards=(reward,)))
    assert tasks.state()["pools"] == {"easy": [0], "normal": [1], "hard": [2]}


def test_a_task_comes_back_from_its_pool_when_the_policy_changes() -> None:
    tasks = Difficulty(1, seed="0/words", config=DifficultyConfig())
    for reward, pool in ((0.0, "hard"), (0.5, "normal"), (1.0, "normal")):
        tasks.record(0, TaskResult(rewards=(reward,)))
        assert tasks.pool_sizes()[pool] == 1


def test_the_shares_of_the_pools_hold() -> None:
    rates = {index: 1.0 if index < 10 else 0.0 if index < 20 else 0.5 for index in range(30)}
    tasks = Difficulty(30, seed="0/words", config=DifficultyConfig(easy_share=0.1, hard_share=0.2))
    play(tasks, rates, 200)
    drawn = play(tasks, rates, 1000)
    assert sum(drawn[index] for index in range(10)) == pytest.approx(100, abs=2)
    assert sum(drawn[index] for index in range(10, 20)) == pytest.approx(200, abs=2)


def test_the_tasks_of_a_pool_take_turns() -> None:
    rates = dict.fromkeys(range(8), 0.5)
    tasks = Difficulty(8, seed="0/words", config=DifficultyConfig())
    assert set(play(tasks, rates, 80).values()) == {10}


def test_a_pool_that_was_empty_for_long_is_not_played_to_make_up_for_it() -> None:
    tasks = Difficulty(20, seed="0/words", config=DifficultyConfig(hard_share=0.1))
    play(tasks, dict.fromkeys(range(20), 0.5), 1000)
    tasks.record(7, TaskResult(rewards=(0.0,)))
    tasks.record(7, TaskResult(rewards=(0.0,)))
    tasks.record(7, TaskResult(rewards=(0.0,)))
    assert tasks.pool_sizes()["hard"] == 1
    next_ten = [tasks.next_task().index for _ in range(20)]
    assert next_ten.count(7) == 2


def test_without_a_share_a_pool_is_played_only_when_nothing_else_is_left() -> None:
    tasks = Difficulty(2, seed="0/words", config=DifficultyConfig(easy_share=0.0, hard_share=0.0))
    tasks.record(0, TaskResult(rewards=(1.0,)))
    assert {tasks.next_task().index for _ in range(9)} == {1}
    tasks.record(1, TaskResult(rewards=(1.0,)))
    assert {tasks.next_task().index for _ in range(9)} == {0, 1}


@given(
    rewards=st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1)), max_size=60),
    shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
)
def test_every_task_is_in_exactly_one_pool(
    rewards: list[tuple[int, float]], shares: tuple[float, float]
) -> None:
    tasks = Difficulty(
        7, seed="0/words", config=DifficultyConfig(easy_share=shares[0], hard_share=shares[1])
    )
    for index, reward in rewards:
        tasks.next_task()
        tasks.record(index, TaskResult(rewards=(reward,)))
    pooled = [index for pool in tasks.state()["pools"].values() for index in pool]
    assert sorted(pooled) == list(range(7))


def test_an_endless_source_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"source 'sums'.*task set with an end"):
        build_curriculum(
            build_curriculum_config("difficulty"), source="sums", num_tasks=None, seed=0
        )


def test_a_user_s_own_curriculum_works_by_its_path() -> None:
    config = build_curriculum_config(f"{__name__}:Backwards")
    built = build_curriculum(config, source="words", num_tasks=3, seed=0)
    assert type(built).__name__ == "Backwards"


def test_a_task_that_gave_no_rewards_stays_in_its_pool() -> None:
    tasks = Difficulty(2, seed="0/words", config=DifficultyConfig())
    before = tasks.state()
    tasks.record(0, TaskResult(failures=("TaskError",)))
    tasks.record(1, TaskResult(Ending.TOO_OLD, rewards=(0.0,)))
    assert tasks.state() == before


@pytest.mark.parametrize("reward", [-1.0, 1.5])
def test_a_reward_that_is_no_solve_rate_is_refused(reward: float) -> None:
    tasks = Difficulty(3, seed="0/words", config=DifficultyConfig())
    with pytest.raises(ValueError, match=r"task 1 got the reward .*reward_range"):
        tasks.record(1, TaskResult(rewards=(0.5, reward)))
    assert tasks.pool_sizes() == {"easy": 0, "normal": 3, "hard": 0}


def test_rewards_of_another_range_are_scaled_to_solve_rates() -> None:
    tasks = Difficulty(3, seed="0/words", config=DifficultyConfig(reward_range=[-1.0, 1.0]))
    tasks.record(0, TaskResult(rewards=(-1.0, -1.0)))
    tasks.record(1, TaskResult(rewards=(1.0, -1.0)))
    tasks.record(2, TaskResult(rewards=(1.0, 1.0)))
    assert tasks.pool_sizes() == {"easy": 1, "normal": 1, "hard": 1}


def test_a_task_beyond_a_threshold_is_dropped_for_good_also_after_a_resume() -> None:
    tasks = Difficulty(4, seed="0/words", config=DifficultyConfig(drop_easy=True, drop_hard=True))
    tasks.record(0, TaskResult(rewards=(1.0, 1.0)))
    tasks.record(1, TaskResult(rewards=(0.0, 0.0)))
    tasks.record(2, TaskResult(rewards=(0.0, 1.0)))
    resumed = Difficulty(4, seed="0/words", config=DifficultyConfig(drop_easy=True, drop_hard=True))
    resumed.load_state(tasks.state())
    for curriculum in (tasks, resumed):
        assert {curriculum.next_task().index for _ in range(40)} == {2, 3}
        curriculum.record(0, TaskResult(rewards=(0.0, 1.0)))
        assert 0 not in {curriculum.next_task().index for _ in range(40)}


def test_only_what_is_asked_for_is_dropped_and_never_the_last_task() -> None:
    tasks = Difficulty(2, seed="0/words", config=DifficultyConfig(drop_hard=True))
    tasks.record(0, TaskResult(rewards=(1.0, 1.0)))
    assert tasks.pool_sizes() == {"easy": 1, "normal": 1, "hard": 0}
    tasks.record(1, TaskResult(rewards=(0.0, 0.0)))
    tasks.record(0, TaskResult(rewards=(0.0, 0.0)))
    tasks.record(0, TaskResult(rewards=(0.0, 0.0)))
    tasks.record(0, TaskResult(rewards=(0.0, 0.0)))
    tasks.record(0, TaskResult(rewards=(0.0, 0.0)))
    assert tasks.pool_sizes() == {"easy": 0, "normal": 0, "hard": 1}
    assert tasks.next_task().index == 0

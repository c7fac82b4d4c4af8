"""Credit formulas, checked by hand-computed numbers."""

from __future__ import annotations

import numpy as np
import pytest
from configs import build_algorithm_config

from gradus.config import algorithms
from gradus.orchestrator.algorithms import build_algorithm
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.credit import (
    centre,
    centre_leave_one_out,
    divide_by_std,
    penalise_length,
    penalise_overlong,
)
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.traces import num_sampled_tokens, trainable_traces
from gradus.testing.episodes import build_episode, build_group, build_message, build_trace

CONTEXT = CreditContext("words", task_key=0)


def advantages_of(episodes: list) -> list[float]:
    return [trace.nodes[1].advantages[0] for trace in trainable_traces(episodes)]


def test_the_baseline_is_the_mean_of_the_group() -> None:
    assert centre(np.array([1.0, 0.0, 0.5])).tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_equal_rewards_give_exactly_zero_whatever_the_rounding() -> None:
    assert not centre(np.array([0.1] * 7)).any()


WEIGHTS = algorithms.GrpoConfig().length_weights


def test_no_reward_at_all_gives_no_advantage() -> None:
    empty = np.array([])
    assert centre(empty).size == 0
    assert (
        penalise_length(empty, output_tokens=[], input_tokens=[], turns=[], weights=WEIGHTS).size
        == 0
    )


def test_leave_one_out_compares_with_the_others_only() -> None:
    found = centre_leave_one_out(np.array([1.0, 0.0, 0.0]))
    assert found.tolist() == pytest.approx([1.0, -0.5, -0.5])


def test_leave_one_out_of_one_reward_is_zero() -> None:
    assert centre_leave_one_out(np.array([3.0])).tolist() == [0.0]


def test_division_by_the_population_standard_deviation() -> None:
    rewards = np.array([2.0, 0.0])
    assert divide_by_std(centre(rewards), rewards).tolist() == pytest.approx([1.0, -1.0])


def test_division_by_no_deviation_gives_zero_not_nan() -> None:
    rewards = np.array([1.0, 1.0])
    assert divide_by_std(centre(rewards), rewards).tolist() == [0.0, 0.0]


def test_length_penalty_is_a_share_of_the_mean_reward() -> None:
    found = penalise_length(
        np.array([1.0, 1.0]),
        output_tokens=[100, 50],
        input_tokens=[10, 10],
        turns=[1, 2],
        weights=WEIGHTS,
    )
    assert found.tolist() == pytest.approx([1 - 0.25 - 0.1 - 0.05, 1 - 0.125 - 0.1 - 0.1])


def test_length_penalty_of_a_group_without_tokens_divides_by_nothing() -> None:
    found = penalise_length(
        np.array([1.0]), output_tokens=[0], input_tokens=[0], turns=[0], weights=WEIGHTS
    )
    assert found.tolist() == [1.0]


def test_grpo_writes_one_advantage_on_every_sampled_token() -> None:
    episodes = build_group([1.0, 0.0])
    GroupRelative(algorithms.GrpoConfig()).score_group(episodes, CONTEXT)
    assert episodes[0].traces[0].nodes[1].advantages == [0.5] * 4
    assert episodes[0].traces[0].nodes[0].advantages is None


def test_a_single_finished_episode_has_no_advantage() -> None:
    episodes = build_group([1.0])
    GroupRelative(algorithms.GrpoConfig()).score_group(episodes, CONTEXT)
    assert advantages_of(episodes) == [0.0]


def test_a_group_without_finished_episodes_is_no_error() -> None:
    GroupRelative(
        algorithms.GrpoConfig(scale_by_std=True, leave_one_out=True, length_penalty=True)
    ).score_group([], CONTEXT)


def test_traces_of_other_agents_do_not_move_the_baseline() -> None:
    judge = build_trace(reward=100.0, agent="judge", trainable=False)
    episodes = [build_episode([build_trace(reward=1.0), judge]), build_episode(reward=0.0)]
    GroupRelative(algorithms.GrpoConfig()).score_group(episodes, CONTEXT)
    assert advantages_of(episodes) == [0.5, -0.5]
    assert judge.nodes[1].advantages is None


def test_shorter_of_two_good_replies_is_better_under_the_length_penalty() -> None:
    episodes = [
        build_episode([build_trace(reward=1.0, turns=1)]),
        build_episode([build_trace(reward=1.0, turns=3)]),
    ]
    GroupRelative(algorithms.GrpoConfig(length_penalty=True)).score_group(episodes, CONTEXT)
    short, long = advantages_of(episodes)
    assert short > 0 > long


def test_a_turn_that_branches_share_is_penalised_once() -> None:
    """Both sampled 4 tokens; one of them in a shared turn and two short branches behind it."""
    shared = build_trace(
        [
            build_message(None, [4]),
            build_message(0, [6, 7], sampled=2),
            build_message(1, [9], sampled=1),
            build_message(1, [11], sampled=1),
        ]
    )
    straight = build_trace([build_message(None, [4]), build_message(0, [6, 7, 8, 9], sampled=4)])
    assert [num_sampled_tokens(shared), num_sampled_tokens(straight)] == [4, 4]
    episodes = [build_episode([shared]), build_episode([straight])]
    GroupRelative(algorithms.GrpoConfig(length_penalty=True)).score_group(episodes, CONTEXT)
    # Equal output; the shared one fed 1 token and took 3 turns, the straight one 1 and 1.
    assert advantages_of(episodes) == pytest.approx([-0.1 / 3, 0.1 / 3])


async def test_grpo_needs_nothing_between_groups() -> None:
    algorithm = GroupRelative(algorithms.GrpoConfig())
    await algorithm.score_episode(build_episode(), CONTEXT)
    algorithm.load_state(algorithm.state())
    assert algorithm.state() == {}


def test_algorithm_is_built_from_its_config() -> None:
    config = build_algorithm_config("grpo", leave_one_out=True)
    episodes = build_group([1.0, 0.0])
    build_algorithm(config).score_group(episodes, CONTEXT)
    assert advantages_of(episodes) == [1.0, -1.0]


def test_an_algorithm_of_your_own_is_found_by_its_path() -> None:
    path = "gradus.orchestrator.algorithms.group_relative:GroupRelative"
    assert isinstance(build_algorithm(build_algorithm_config(path)), GroupRelative)


ROUNDED = [0.1 + 0.2, 0.3, 0.3, 0.3]
"""Equal, as sums of weighted parts are."""


@pytest.mark.parametrize(
    "options",
    [{}, {"scale_by_std": True}, {"leave_one_out": True}, {"length_penalty": True}],
)
def test_rewards_that_differ_by_rounding_alone_train_nothing(options: dict) -> None:
    episodes = build_group(ROUNDED)
    GroupRelative(algorithms.GrpoConfig(**options)).score_group(episodes, CONTEXT)
    assert advantages_of(episodes) == [0.0] * 4


def test_parts_that_cancel_leave_no_advantage_either() -> None:
    rewards = np.array([0.1 + 0.2 - 0.3, 0.0])
    assert divide_by_std(centre(rewards), rewards).tolist() == [0.0, 0.0]


def test_rewards_that_differ_by_little_still_train() -> None:
    rewards = np.array([1e-6, 2e-6])
    assert divide_by_std(centre(rewards), rewards).tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_a_longer_reply_never_gains_by_the_length_penalty(reward: float) -> None:
    episodes = [
        build_episode([build_trace(reward=reward, turns=1)]),
        build_episode([build_trace(reward=reward, turns=3)]),
    ]
    GroupRelative(algorithms.GrpoConfig(length_penalty=True)).score_group(episodes, CONTEXT)
    short, long = advantages_of(episodes)
    assert short > 0 > long


def test_each_part_of_the_length_penalty_has_its_own_weight() -> None:
    lengths = {"output_tokens": [100, 50], "input_tokens": [10, 20], "turns": [1, 4]}
    found = penalise_length(
        np.array([2.0, 2.0]), **lengths, weights={"output": 0.0, "input": 0.5, "turns": 1.0}
    )
    assert found.tolist() == pytest.approx([2 - 2 * (0.25 + 0.25), 2 - 2 * (0.5 + 1.0)])


def test_a_part_of_the_length_penalty_that_is_not_named_weighs_nothing() -> None:
    episodes = [
        build_episode([build_trace(reward=1.0, turns=1)]),
        build_episode([build_trace(reward=1.0, turns=2)]),
    ]
    GroupRelative(
        algorithms.GrpoConfig(length_penalty=True, length_weights={"turns": 0.5})
    ).score_group(episodes, CONTEXT)
    assert advantages_of(episodes) == pytest.approx([0.125, -0.125])


def test_an_overlong_reply_pays_more_the_nearer_it_comes_to_the_limit() -> None:
    found = penalise_overlong(
        np.ones(5), output_tokens=[10, 80, 90, 100, 200], limit_tokens=100, cache_tokens=20
    )
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])


def test_grpo_punishes_what_comes_near_the_limit() -> None:
    """4 and 12 sampled tokens; from 8 on it costs, at 12 it costs 1."""
    episodes = [
        build_episode([build_trace(reward=1.0, turns=1)]),
        build_episode([build_trace(reward=1.0, turns=3)]),
    ]
    algorithm = GroupRelative(
        algorithms.GrpoConfig(overlong_limit_tokens=12, overlong_cache_tokens=4)
    )
    algorithm.score_group(episodes, CONTEXT)
    assert advantages_of(episodes) == pytest.approx([0.5, -0.5])


def test_rewards_that_differ_by_float32_rounding_are_equal_when_their_size_divides() -> None:
    rewards = np.array([float(np.float32(0.1) * 3), 0.3, 0.3])
    assert divide_by_std(centre(rewards), rewards).tolist() == [0.0, 0.0, 0.0]
    rewards = np.array([0.30001, 0.3])
    assert divide_by_std(centre(rewards), rewards).tolist() == pytest.approx([1.0, -1.0])

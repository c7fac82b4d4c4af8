"""`max_rl` and `hierarchical_grpo`, checked by hand-computed numbers."""

from __future__ import annotations

import pytest
from verifiers.v1.episode import WireEpisode

from gradus.config import algorithms
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.group_relative import HierarchicalGroupRelative, MaxRl
from gradus.testing.episodes import build_episode, build_group, build_trace

CONTEXT = CreditContext("words", task_key="a")


def build_game(**rewards: float) -> WireEpisode:
    """An episode with one trace per agent; trailing digits tell traces of one agent apart."""
    return build_episode(
        [build_trace(reward=r, agent=name.rstrip("0123456789")) for name, r in rewards.items()]
    )


def advantages_of(episode: WireEpisode) -> list[float | None]:
    return [trace.nodes[1].advantages and trace.nodes[1].advantages[0] for trace in episode.traces]


def scored(algorithm: MaxRl | HierarchicalGroupRelative, episodes: list) -> list[list]:
    algorithm.score_group(episodes, CONTEXT)
    return [advantages_of(episode) for episode in episodes]


def test_max_rl_divides_by_the_mean_so_that_a_rare_success_counts_more() -> None:
    assert scored(MaxRl(), build_group([1.0, 0.0, 0.0, 0.0])) == [[3.0], [-1.0], [-1.0], [-1.0]]
    assert scored(MaxRl(), build_group([1.0, 1.0, 0.0, 0.0])) == [[1.0], [1.0], [-1.0], [-1.0]]


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [-1.0, 0.0], [-1.0, 1.0], [0.5, 0.5], [1.0]])
def test_max_rl_is_zero_without_a_positive_mean_or_a_difference(rewards: list[float]) -> None:
    assert scored(MaxRl(), build_group(rewards)) == [[0.0]] * len(rewards)


def test_peers_are_the_traces_of_the_same_agent_in_the_group() -> None:
    games = [build_game(white=1.0, black=-1.0), build_game(white=0.0, black=0.0)]
    found = scored(HierarchicalGroupRelative(algorithms.HierarchicalGrpoConfig()), games)
    assert found == [[0.5, -0.5], [-0.5, 0.5]]


def test_agents_of_one_episode_are_compared_inside_it_when_they_are_named() -> None:
    games = [
        build_game(proposer=0.5, solver1=1.0, solver2=0.0),
        build_game(proposer=0.0, solver1=1.0, solver2=1.0),
    ]
    found = scored(
        HierarchicalGroupRelative(algorithms.HierarchicalGrpoConfig(episode_agents=["solver"])),
        games,
    )
    assert found == [[0.25, 0.5, -0.5], [-0.25, 0.0, 0.0]]


def test_a_trace_without_a_peer_has_no_advantage() -> None:
    assert scored(
        HierarchicalGroupRelative(algorithms.HierarchicalGrpoConfig()),
        [build_game(white=1.0, black=-1.0)],
    ) == [[0.0, 0.0]]


def test_an_agent_that_does_not_train_is_no_peer() -> None:
    judge = build_trace(reward=100.0, agent="white", trainable=False)
    games = [build_game(white=1.0), build_game(white=0.0), build_episode([judge])]
    assert scored(HierarchicalGroupRelative(algorithms.HierarchicalGrpoConfig()), games) == [
        [0.5],
        [-0.5],
        [None],
    ]

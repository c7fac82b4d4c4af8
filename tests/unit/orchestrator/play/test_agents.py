"""Which traces train, and which algorithms are refused for which agents."""

from __future__ import annotations

from typing import Any

import pytest
from configs import build_algorithm_config
from verifiers.v1.episode import WireEpisode

from gradus.config import SamplingConfig, SourceConfig
from gradus.config.schema.environment import EnvironmentTimeoutConfig
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms import compares_all_traces
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.play.agents import check_agents, mark_trainable
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.types import Failure
from gradus.testing.episodes import build_episode, build_trace

BOTH = {"first": True, "second": True}


def build_game(**task: Any) -> WireEpisode:
    """Two players and a judge whom the environment does not let train."""
    episode = build_episode(
        [
            build_trace(agent="first"),
            build_trace(agent="second"),
            build_trace(agent="judge", trainable=False),
        ]
    )
    record = episode.task.data.model_dump() | task
    episode.task.data = type(episode.task.data).model_validate(record)
    return episode


def trained(episode: WireEpisode) -> list[str]:
    return [trace.agent.name for trace in episode.traces if trace.agent.trainable]


def test_every_agent_that_the_environment_lets_train_does() -> None:
    episode = build_game()
    assert mark_trainable(episode, []) is None
    assert trained(episode) == ["first", "second"]


def test_agents_of_the_config_s_choice_do_not_train() -> None:
    episode = build_game()
    mark_trainable(episode, ["second", "judge"])
    assert trained(episode) == ["first"]


def test_the_learner_seat_of_the_task_is_the_one_that_trains() -> None:
    episode = build_game(learner_seat="second")
    assert mark_trainable(episode, []) is None
    assert trained(episode) == ["second"]


def test_a_failed_episode_is_its_error_even_before_the_learner_played() -> None:
    """`ProviderError` is worth another attempt, an invalid task is not."""
    episode = build_game(learner_seat="second")
    episode.traces = [build_trace(agent="first", error="ProviderError")]
    episode.ok = False
    assert mark_trainable(episode, []) is None
    assert find_failure(episode) == Failure("ProviderError", "scripted")
    assert trained(episode) == []


def test_a_task_that_names_no_learner_is_an_error_where_one_baseline_serves_all() -> None:
    """The first task of the source named one, so that the start refused nothing."""
    failure = mark_trainable(build_game(), [], has_one_baseline=True)
    assert failure is not None
    assert failure.kind == "missing_learner_seat"
    assert "agents first, second all train" in failure.message
    assert mark_trainable(build_game(learner_seat="first"), [], has_one_baseline=True) is None
    assert mark_trainable(build_game(), ["second"], has_one_baseline=True) is None


def test_a_learner_seat_does_not_train_an_agent_that_must_not() -> None:
    episode = build_game(learner_seat="judge")
    mark_trainable(episode, [])
    assert trained(episode) == []


def test_a_task_whose_learner_seat_is_null_trains_every_agent() -> None:
    episode = build_game(learner_seat=None)
    assert mark_trainable(episode, []) is None
    assert trained(episode) == trained(build_game())
    failure = mark_trainable(build_game(learner_seat=None), [], has_one_baseline=True)
    assert failure is not None
    assert failure.kind == "missing_learner_seat"


@pytest.mark.parametrize("seat", ["", "third", 1])
def test_a_missing_learner_seat_is_an_error_that_names_the_agents(seat: object) -> None:
    failure = mark_trainable(build_game(learner_seat=seat), [])
    assert failure is not None
    assert failure.kind == "invalid_learner_seat"
    assert f"is {seat!r}, who played no turn of this episode" in failure.message
    assert "those who did: first, judge, second" in failure.message


def test_a_learner_that_was_never_asked_is_told_as_such() -> None:
    episode = build_game(learner_seat="second")
    episode.traces = [trace for trace in episode.traces if trace.agent.name != "second"]
    failure = mark_trainable(episode, [])
    assert failure is not None
    assert "is 'second', who played no turn" in failure.message
    assert "let the environment ask it in every episode" in failure.message


def source(algorithm: str, *, untrained: list[str] | None = None, **options: Any) -> SourceConfig:
    return SourceConfig(
        name="poker",
        ratio=1.0,
        group_size=4,
        sampling=SamplingConfig(temperature=1.0),
        algo=build_algorithm_config(algorithm, **options),
        timeout=EnvironmentTimeoutConfig(),
        address=None,
        state_columns=[],
        untrained_agents=untrained or [],
    )


class Mine(GroupRelative):
    """A class of a user."""


@pytest.mark.parametrize("algorithm", ["grpo", "max_rl", "echo"])
def test_one_baseline_over_mixed_seats_is_refused_with_what_to_change(algorithm: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_agents(source(algorithm), BOTH, {})
    for words in ("'poker'", "first, second all train", "Use rae", "train = false", "learner_seat"):
        assert words in str(caught.value)


@pytest.mark.parametrize("algorithm", ["rae", "hierarchical_grpo", "my_package.mine:Own"])
def test_algorithms_that_tell_agents_apart_may_train_several(algorithm: str) -> None:
    check_agents(source(algorithm), BOTH, {})


def test_one_trained_agent_among_several_is_a_group() -> None:
    check_agents(source("grpo", untrained=["second"]), BOTH, {})
    check_agents(source("grpo"), {"agent": True, "user": False}, {})
    check_agents(source("grpo"), {"agent": True}, {})


def test_a_learner_seat_makes_a_group_of_one_agent() -> None:
    check_agents(source("grpo"), BOTH, {"learner_seat": "first"})
    with pytest.raises(ConfigError, match="first, second all train"):
        check_agents(source("grpo"), BOTH, {"learner_seat": None})


def test_rae_without_agents_is_refused() -> None:
    with pytest.raises(ConfigError, match="only the agent 'agent'; use grpo"):
        check_agents(source("rae"), {"agent": True}, {})


def test_an_environment_in_which_nobody_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no agent trains \(first, second\)"):
        check_agents(source("rae", untrained=["first", "second"]), BOTH, {})


def test_episode_agents_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="names solver, but the environment has first, second"):
        check_agents(source("hierarchical_grpo", episode_agents=["solver", "first"]), BOTH, {})


def test_an_environment_that_does_not_say_its_agents_is_believed() -> None:
    check_agents(source("rae"), {}, {})


def test_a_class_that_inherits_one_baseline_is_refused_like_its_base() -> None:
    assert compares_all_traces(build_algorithm_config(f"{__name__}:Mine"))
    assert not compares_all_traces(build_algorithm_config("rae"))
    with pytest.raises(ConfigError, match="compares all traces"):
        check_agents(source("x:Mine"), BOTH, {}, compares_all_traces=True)

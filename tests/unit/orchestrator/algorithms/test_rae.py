"""Role-conditioned advantages, with the numbers of `spec/algorithms.md` worked out by hand."""

from __future__ import annotations

import json

import pytest
from verifiers.v1.episode import WireEpisode

from gradus.config import algorithms
from gradus.errors import CorruptStateError, EnvironmentFailure
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.rae import RoleAdvantageEstimation
from gradus.orchestrator.groups.grading import SourceGrader
from gradus.orchestrator.types import Failure, Group, PlayedEpisode, Task, TaskPointer
from gradus.testing.episodes import build_episode, build_group, build_trace
from gradus.wire.versions import VersionSpan


def scored(
    algorithm: RoleAdvantageEstimation,
    episodes: list[WireEpisode],
    *,
    environment: str = "poker",
    task: str = "deal-1",
    failed: list[WireEpisode] | None = None,
) -> list[float]:
    """Advantages of all traces of one group, in order."""
    context = CreditContext(environment, task, failed or [])
    algorithm.score_group(episodes, context)
    return [t.nodes[1].advantages[0] for episode in episodes for t in episode.traces]


def baseline(algorithm: RoleAdvantageEstimation) -> float:
    """The only baseline there is."""
    ((*_, value),) = algorithm.state()["baselines"]
    return value


def test_the_reward_enters_the_baseline_before_it_is_compared() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.9))
    assert scored(algorithm, build_group([1.0])) == pytest.approx([0.9])
    assert scored(algorithm, build_group([1.0])) == pytest.approx([0.81])


def test_traces_move_the_baseline_one_after_the_other() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5))
    assert scored(algorithm, build_group([1.0, 0.0])) == pytest.approx([0.5, -0.25])
    assert baseline(algorithm) == pytest.approx(0.25)


def test_subtract_first_compares_with_the_past_alone() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.9, order="subtract_first"))
    assert scored(algorithm, build_group([1.0])) == pytest.approx([1.0])
    assert scored(algorithm, build_group([1.0])) == pytest.approx([0.9])
    assert baseline(algorithm) == pytest.approx(0.19)


def test_a_failed_trace_with_reward_zero_also_moves_the_baseline() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5))
    failed = build_episode([build_trace(reward=0.0, error="ProviderError")])
    assert scored(algorithm, build_group([1.0]), failed=[failed]) == pytest.approx([0.5])
    assert baseline(algorithm) == pytest.approx(0.25)
    assert failed.traces[0].nodes[1].advantages is None


def test_a_failed_trace_moves_the_baseline_in_its_turn() -> None:
    """It started before the finished one, which must see the baseline that it left."""
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5))
    group = Group("g000000", TaskPointer("poker", 0, 0), Task({}, "deal-1"))
    failed = build_episode([build_trace(reward=0.0, error="ProviderError")])
    episodes = [*build_group([1.0]), failed, *build_group([1.0])]
    for number, episode in enumerate(episodes):
        failure = Failure("ProviderError", "scripted") if episode is failed else None
        played = PlayedEpisode(f"g000000.{number}", group.id, VersionSpan(0, 0), episode, failure)
        group.played.insert(0, played)  # The last ended first.
    SourceGrader(algorithm, [], temperature=1.0, max_length_tokens=100).grade(group)
    # b: 0 -> 0.5 -> 0.25 -> 0.625
    advantages = [e.traces[0].nodes[1].advantages for e in (episodes[0], episodes[2])]
    assert [values[0] for values in advantages] == pytest.approx([0.5, 0.375])
    assert baseline(algorithm) == pytest.approx(0.625)


def test_a_failed_trace_that_was_never_scored_says_nothing_about_the_role() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5))
    failed = build_episode([build_trace(reward=None, error="ProviderError")])
    scored(algorithm, build_group([1.0]), failed=[failed])
    assert baseline(algorithm) == pytest.approx(0.5)


def test_a_finished_trace_without_a_reward_is_an_error_that_names_it() -> None:
    episode = build_episode([build_trace(reward=None, agent="first")])
    with pytest.raises(EnvironmentFailure, match=r"'poker', task 'deal-1': agent 'first' has no"):
        scored(RoleAdvantageEstimation(algorithms.RaeConfig()), [episode])


def test_every_environment_task_and_agent_has_its_own_baseline() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5))
    game = [build_trace(reward=1.0, agent="first"), build_trace(reward=-1.0, agent="second")]
    assert scored(algorithm, [build_episode(game)]) == [0.5, -0.5]
    assert scored(algorithm, build_group([1.0]), task="deal-2") == [0.5]
    assert scored(algorithm, build_group([1.0]), environment="chess") == [0.5]
    assert len(algorithm.state()["baselines"]) == 4


def test_the_task_can_be_dropped_from_the_key() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5, key="environment/agent"))
    scored(algorithm, build_group([1.0]), task="deal-1")
    assert scored(algorithm, build_group([1.0]), task="deal-2") == [0.25]


def test_an_agent_that_does_not_train_has_no_baseline() -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig())
    algorithm.score_group(
        [build_episode([build_trace(trainable=False)])], CreditContext("poker", "deal-1")
    )
    assert algorithm.state()["baselines"] == []


def test_the_baselines_are_recorded_per_agent() -> None:
    context = CreditContext("poker", 7)
    RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5)).score_group(
        [build_episode([build_trace(reward=1.0, agent="first")])], context
    )
    assert context.numbers == {"rae_baseline/first": 0.5}


def test_a_restart_goes_on_with_the_same_baselines() -> None:
    before, after = (
        RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.9)),
        RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.9)),
    )
    scored(before, build_group([1.0]), task="a")
    before.score_group(build_group([0.5]), CreditContext("poker", 12))
    after.load_state(json.loads(json.dumps(before.state())))
    assert after.state() == before.state()
    assert scored(after, build_group([1.0]), task="a") == pytest.approx([0.81])


@pytest.mark.parametrize("state", [{}, {"key": "environment/agent", "baselines": []}])
def test_the_baselines_of_another_key_are_refused(state: dict[str, object]) -> None:
    with pytest.raises(CorruptStateError, match="resume with the same `key`"):
        RoleAdvantageEstimation(algorithms.RaeConfig()).load_state(state)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_failed_trace_whose_reward_is_not_finite_moves_no_baseline(reward: float) -> None:
    algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.5))
    failed = build_episode([build_trace(reward=reward, error="ProviderError")])
    scored(algorithm, build_group([1.0]), failed=[failed])
    assert baseline(algorithm) == pytest.approx(0.5)
    assert scored(algorithm, build_group([1.0])) == pytest.approx([0.25])


def test_a_stored_baseline_that_is_not_finite_is_refused() -> None:
    rows = [["poker", "deal-1", "first", float("nan")]]
    state = {"key": "environment/task/agent", "baselines": rows}
    with pytest.raises(CorruptStateError, match=r"'first'.*is not finite"):
        RoleAdvantageEstimation(algorithms.RaeConfig()).load_state(state)

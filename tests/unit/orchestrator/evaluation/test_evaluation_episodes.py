"""Which episodes an evaluation has, which are played again, and what a score is made of."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from scripted_peers import ScriptedEnvironment

from gradus.config import ErrorPolicyConfig, EvaluationSourceConfig, SamplingConfig
from gradus.config.schema.environment import RETRIED_ERRORS, EnvironmentTimeoutConfig
from gradus.errors import ConfigError, EnvironmentFailure
from gradus.orchestrator.evaluation.episodes import (
    EpisodeKey,
    EvaluatedEpisode,
    EvaluationSource,
    count_tasks,
    play_episodes,
)
from gradus.orchestrator.evaluation.evaluator import Measurement, warn_of_graded_rewards
from gradus.orchestrator.evaluation.results import EpisodeScore, evaluate, result_metrics
from gradus.orchestrator.failures import ErrorPolicy
from gradus.orchestrator.play.environment import TaskRefused
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.records.numbers import MAX_NAMES
from gradus.orchestrator.types import EpisodeFailed, Failure, PlayedEpisode
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.episode import TaskSetInfo
from gradus.wire.versions import VersionSpan

PROVIDER_DOWN = EpisodeFailed(Failure("ProviderError", "upstream 500: scripted"))


def again(retries: int) -> ErrorPolicy:
    return ErrorPolicy(ErrorPolicyConfig(retries=retries, backoff_seconds=0.0))


def build_source(environment: ScriptedEnvironment, **changes: Any) -> EvaluationSource:
    values = {"name": "words", "num_tasks": 2, "group_size": 2, "environment": environment}
    return EvaluationSource(**(values | changes))


async def play(
    environment: ScriptedEnvironment,
    *,
    max_in_flight: int = 8,
    max_retries: int = 2,
    **changes: Any,
) -> list[EvaluatedEpisode]:
    source = build_source(environment, errors=again(max_retries), **changes)
    ended: list[EvaluatedEpisode] = []
    async with asyncio.timeout(60):
        await play_episodes(
            [source],
            source.episode_keys(),
            version=3,
            max_in_flight=max_in_flight,
            on_end=ended.append,
        )
    return ended


def build_ended(key: EpisodeKey, episode: Any, *, version: int = 0) -> EvaluatedEpisode:
    span = VersionSpan(version, version)
    played = PlayedEpisode(str(key), key.group_id, span, episode)
    return EvaluatedEpisode(key, played, attempts=2, task_key="key-4")


async def test_every_task_is_played_as_often_as_its_group_is_large() -> None:
    ended = await play(ScriptedEnvironment())
    keys = sorted((e.key.task, e.key.replica) for e in ended)
    assert keys == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {e.played.versions for e in ended} == {VersionSpan(3, 3)}


async def test_not_more_than_the_limit_runs_at_once() -> None:
    running: list[int] = []
    most = 0

    async def wait(number: int) -> None:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.remove(number)

    await play(ScriptedEnvironment(wait=wait), max_in_flight=3)
    assert most == 3


async def test_an_error_that_may_pass_is_played_again_and_counted_once() -> None:
    environment = ScriptedEnvironment(
        play=lambda number: PROVIDER_DOWN if number < 2 else build_episode(reward=1.0)
    )
    ended = await play(environment, max_in_flight=1)
    assert [e.attempts for e in ended] == [3, 1, 1, 1]
    assert [e.score().reward for e in ended] == [1.0] * 4


async def test_an_error_that_does_not_pass_is_the_result_after_the_last_attempt() -> None:
    ended = await play(ScriptedEnvironment(play=lambda _: PROVIDER_DOWN), max_retries=1)
    assert [e.attempts for e in ended] == [2, 2, 2, 2]
    assert [e.score() for e in ended if e.key.task == 1] == [
        EpisodeScore(1, error="ProviderError")
    ] * 2


@pytest.mark.parametrize("kind", RETRIED_ERRORS)
async def test_what_training_plays_again_an_evaluation_does_too(kind: str) -> None:
    failed = EpisodeFailed(Failure(kind, "scripted"))
    environment = ScriptedEnvironment(
        play=lambda number: failed if number == 0 else build_episode(reward=1.0)
    )
    ended = await play(environment, max_in_flight=1)
    assert [e.attempts for e in ended] == [2, 1, 1, 1]


async def test_a_full_context_counts_as_truncated() -> None:
    def play_to_the_end_of_the_context(_: int) -> Any:
        episode = build_episode(reward=1.0)
        episode.traces[0].stop_condition = "context_length"
        return episode

    ended = await play(ScriptedEnvironment(play=play_to_the_end_of_the_context))
    assert {e.score().is_truncated for e in ended} == {True}


async def test_an_error_of_the_task_itself_is_not_played_again() -> None:
    broken = EpisodeFailed(Failure("TaskError", "division by zero"))
    environment = ScriptedEnvironment(play=lambda _: broken)
    ended = await play(environment)
    assert [e.attempts for e in ended] == [1, 1, 1, 1]
    assert len(environment.calls) == 4


@pytest.mark.shows("F62", "F63")
@pytest.mark.parametrize(
    ("status", "is_retried"),
    [
        (429, True),
        (408, True),
        (500, True),
        (503, True),
        (None, True),
        (400, False),
        (401, False),
        (404, False),
    ],
)
def test_the_provider_s_status_decides(status: int | None, is_retried: bool) -> None:
    trace = build_trace(error="ProviderError")
    trace.errors[0].status_code = status
    failure = find_failure(build_episode([trace]), needs_tokens=False)
    assert failure is not None
    assert (again(1).wait_before_retry(failure, retry=0) is not None) is is_retried


async def test_a_reward_that_is_no_number_is_an_error_and_never_zero() -> None:
    ended = await play(ScriptedEnvironment(play=lambda _: build_episode(reward=float("nan"))))
    assert {e.score().error for e in ended} == {"invalid_reward"}


async def test_an_episode_without_tokens_is_scored_all_the_same() -> None:
    """A plain chat endpoint tells no token ids."""

    def play_without_tokens(_: int) -> Any:
        episode = build_episode(reward=1.0)
        for node in episode.traces[0].nodes:
            node.token_ids, node.mask, node.logprobs = [], [], []
        return episode

    ended = await play(ScriptedEnvironment(play=play_without_tokens))
    assert [e.score().reward for e in ended] == [1.0] * 4


async def test_an_episode_of_nobody_who_is_measured_is_an_error() -> None:
    judge = build_trace(agent="judge", trainable=False)
    ended = await play(ScriptedEnvironment(play=lambda _: build_episode([judge])))
    assert {e.score().error for e in ended} == {"no_trace"}


async def test_a_task_that_cannot_be_loaded_fails_its_episodes_only() -> None:
    refused = {1: TaskRefused("environment 'words': KeyError: 'answer'")}
    ended = await play(ScriptedEnvironment(refused=refused), num_tasks=3, group_size=2)
    errors = {(e.key.task, e.score().error) for e in ended}
    assert errors == {(0, None), (1, "unreadable_task"), (2, None)}
    assert len(ended) == 6


async def test_an_environment_that_is_lost_ends_the_evaluation() -> None:
    refused = {0: EnvironmentFailure("the process ended")}
    with pytest.RaisesGroup(EnvironmentFailure, allow_unwrapped=False, flatten_subgroups=True):
        await play(ScriptedEnvironment(refused=refused), max_in_flight=1)


def test_a_score_is_the_mean_over_the_agents_that_are_measured() -> None:
    traces = [
        build_trace(reward=1.0, agent="a"),
        build_trace(reward=0.0, agent="b"),
        build_trace(reward=9.0, agent="judge", trainable=False),
    ]
    score = build_ended(EpisodeKey("words", 4, 0), build_episode(traces)).score()
    assert (score.task, score.reward, score.length_tokens) == (4, 0.5, 8)


def test_a_record_says_where_the_episode_stood() -> None:
    ended = build_ended(EpisodeKey("words", 4, 1), build_episode(reward=1.0), version=7)
    fields = ended.record([])["gradus"]
    assert fields["episode"] == "words/4/1"
    assert fields["task"] == {"index": 4, "key": "key-4"}
    assert fields["versions"] == {"oldest": 7, "newest": 7}
    assert (fields["attempts"], fields["reward"], fields["error"]) == (2, 1.0, None)


def build_source_config(num_tasks: int | None) -> EvaluationSourceConfig:
    return EvaluationSourceConfig(
        name="words",
        num_tasks=num_tasks,
        group_size=1,
        sampling=SamplingConfig(),
        timeout=EnvironmentTimeoutConfig(),
        address=None,
        state_columns=[],
    )


@pytest.mark.parametrize(
    ("asked", "there", "played"), [(None, 7, 7), (3, 7, 3), (7, 7, 7), (5, None, 5)]
)
def test_all_tasks_are_played_unless_fewer_are_asked_for(
    asked: int | None, there: int | None, played: int
) -> None:
    assert (
        count_tasks(build_source_config(asked), TaskSetInfo(num_tasks=there, taskset="words"))
        == played
    )


@pytest.mark.parametrize(("asked", "there"), [(None, None), (8, 7)])
def test_tasks_that_are_not_there_are_refused(asked: int | None, there: int | None) -> None:
    with pytest.raises(ConfigError, match="'words' has"):
        count_tasks(build_source_config(asked), TaskSetInfo(num_tasks=there, taskset="words"))


def test_graded_rewards_are_said_once_per_environment(caplog: pytest.LogCaptureFixture) -> None:
    sources = [build_source(ScriptedEnvironment(), group_size=1)]
    measurement = Measurement(0, sources)
    measurement.scores["words"].append(EpisodeScore(0, 0.5))
    found = measurement.results()
    already: set[str] = set()
    with caplog.at_level(logging.WARNING):
        warn_of_graded_rewards(found, already)
        warn_of_graded_rewards(found, already)
    assert [r.getMessage() for r in caplog.records] == [
        "environment 'words' gives rewards other than 0 and 1: pass@k and pass^k mean nothing "
        "there, only avg@k is reported"
    ]
    assert "eval/words/pass@1" not in result_metrics(found)


def test_an_average_of_few_finished_episodes_is_never_the_best(
    caplog: pytest.LogCaptureFixture,
) -> None:
    measurement = Measurement(2, [build_source(ScriptedEnvironment(), num_tasks=10)])
    failed = EpisodeScore(0, error="ProviderError")
    measurement.scores["words"] = [EpisodeScore(0, 1.0)] * 18 + [failed] * 2
    assert measurement.best() is None
    assert "2 of 20 episodes of 'words' failed" in caplog.text
    measurement.scores["words"] = [EpisodeScore(0, 1.0)] * 19 + [failed]
    best = measurement.best()
    assert best is not None
    assert best.finished == {"words": 19}
    assert str(best).endswith("in 19 episodes of words")


def test_an_environment_without_an_ended_episode_has_its_row() -> None:
    found = Measurement(0, [build_source(ScriptedEnvironment())]).results()
    assert found["words"].num_episodes == 0
    assert found["words"].group_size == 2


def build_match(**task: Any) -> Any:
    """The policy beat an opponent of a zero-sum game, and an unrewarded judge looked on."""
    judge = build_trace(agent="judge", reward=None)
    judge.rewards = {}
    episode = build_episode(
        [
            build_trace(reward=1.0, agent="first"),
            build_trace(reward=-1.0, agent="second"),
            judge,
        ]
    )
    record = episode.task.data.model_dump() | task
    episode.task.data = type(episode.task.data).model_validate(record)
    return episode


async def test_only_the_policy_s_own_agents_are_measured() -> None:
    environment = ScriptedEnvironment(play=lambda _: build_match())
    ended = await play(environment, unmeasured_agents=["judge", "second"])
    assert {e.score().reward for e in ended} == {1.0}


async def test_the_learner_seat_of_a_task_is_the_one_that_is_measured() -> None:
    environment = ScriptedEnvironment(play=lambda _: build_match(learner_seat="second"))
    ended = await play(environment, unmeasured_agents=["judge"])
    assert {e.score().reward for e in ended} == {-1.0}


async def test_a_learner_seat_that_nobody_has_is_an_error_of_the_episode() -> None:
    environment = ScriptedEnvironment(play=lambda _: build_match(learner_seat="third"))
    ended = await play(environment, unmeasured_agents=["judge"])
    assert {e.score().error for e in ended} == {"invalid_learner_seat"}


async def test_the_agents_of_a_game_have_numbers_of_their_own_and_no_common_average() -> None:
    game = await play(
        ScriptedEnvironment(play=lambda _: build_match()), unmeasured_agents=["judge"]
    )
    words = await play(ScriptedEnvironment())
    found = result_metrics(
        {
            "poker": evaluate([it.score() for it in game], group_size=1),
            "words": evaluate([it.score() for it in words], group_size=1),
        }
    )
    assert found["eval/poker/agent/first/reward/mean"] == 1.0
    assert found["eval/poker/agent/second/reward/mean"] == -1.0
    assert not [name for name in found if "poker" in name and ("@" in name or "^" in name)]
    assert found["eval/avg@1"] == found["eval/words/avg@1"], "a game has no part in the average"


def test_names_beyond_the_limit_are_counted() -> None:
    many = EpisodeScore(0, 1.0, values={f"metric/task_{n}": 1.0 for n in range(300)})
    found = result_metrics({"words": evaluate([many], group_size=1)})
    assert len([name for name in found if "/metric/" in name]) == MAX_NAMES
    assert found["eval/words/names_left_out/sum"] == 300 - MAX_NAMES


def test_the_stages_of_an_evaluation_have_percentiles() -> None:
    scores = [EpisodeScore(n, 1.0, values={"setup_seconds": float(n)}) for n in range(20)]
    found = result_metrics({"words": evaluate(scores, group_size=1)})
    assert found["eval/words/setup_seconds/p50"] == 9.0
    assert found["eval/words/setup_seconds/p95"] == 18.0
    assert found["eval/words/length_tokens/p95"] == 0.0

"""Slow tasks that start and do not train are noticed, and nothing else is taken for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import build_sample
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from scripted_peers import ScriptedEnvironment, ScriptedPolicy

from gradus.orchestrator.records.starvation import (
    WINDOW_GROUPS,
    GroupTime,
    PlayTime,
    Starvation,
    group_time,
    slow_bias,
)
from gradus.orchestrator.types import (
    ABANDONED,
    RUN_ENDED,
    STALE,
    Failure,
    Group,
    GroupOutcome,
    PlayedEpisode,
    Task,
    TaskPointer,
)
from gradus.testing.episodes import build_episode
from gradus.wire.versions import VersionSpan


def groups_of(outcome: GroupOutcome, number: int, *, seconds: float) -> list[GroupTime]:
    is_trained = outcome is GroupOutcome.TRAINED
    return [
        GroupTime(outcome, (PlayTime(seconds + n / 1000, 8, is_trained),)) for n in range(number)
    ]


def mixed(*, slow_trained: int, slow_lost: int, quick: int = 30) -> list[GroupTime]:
    return [
        *groups_of(GroupOutcome.TRAINED, quick, seconds=1.0),
        *groups_of(GroupOutcome.TRAINED, slow_trained, seconds=9.0),
        *groups_of(GroupOutcome.TOO_SLOW, slow_lost, seconds=9.5),
    ]


def test_when_every_task_trains_there_is_no_bias() -> None:
    groups = mixed(slow_trained=10, slow_lost=0)
    assert slow_bias(groups) == 0.0


def test_when_no_slow_task_trains_the_bias_is_one() -> None:
    groups = mixed(slow_trained=0, slow_lost=10)
    assert slow_bias(groups) == 1.0


def test_half_of_the_slow_tasks_is_in_between() -> None:
    assert slow_bias(mixed(slow_trained=5, slow_lost=5)) == pytest.approx(1 - 0.5 / (35 / 40))


def test_tasks_lost_for_other_reasons_are_no_sign_of_starvation() -> None:
    groups = [
        *groups_of(GroupOutcome.TRAINED, 30, seconds=1.0),
        *groups_of(GroupOutcome.OTHER, 30, seconds=9.0),
    ]
    assert slow_bias(groups) == 0.0


def test_quick_tasks_that_are_lost_are_no_sign_of_starvation() -> None:
    groups = [
        *groups_of(GroupOutcome.TOO_SLOW, 10, seconds=0.5),
        *groups_of(GroupOutcome.TRAINED, 30, seconds=1.0),
    ]
    assert slow_bias(groups) < 0


@pytest.mark.parametrize("groups", [(5, 10), (2, 100)])
def test_what_chance_may_take_is_no_bias(groups: tuple[int, int]) -> None:
    lost, quick = groups
    assert slow_bias(mixed(slow_trained=0, slow_lost=lost, quick=quick)) == 0.0


@given(
    st.lists(st.tuples(st.sampled_from(list(GroupOutcome)), st.floats(0, 1e6)), max_size=60),
)
def test_the_bias_is_at_most_one(groups: list[tuple[GroupOutcome, float]]) -> None:
    times = [GroupTime(outcome, (PlayTime(seconds, None, False),)) for outcome, seconds in groups]
    assert slow_bias(times) <= 1.0


def test_a_group_is_as_slow_as_its_slowest_episode() -> None:
    group = GroupTime(GroupOutcome.TRAINED, (PlayTime(1.0, 8, True), PlayTime(7.0, 8, True)))
    assert group.seconds == 7.0


def test_started_and_trained_distributions_stand_side_by_side() -> None:
    starvation = Starvation()
    for group in mixed(slow_trained=0, slow_lost=20, quick=60):
        starvation.add("words", group)
    metrics = starvation.metrics()
    assert metrics["episode/words/started_seconds/p95"] > 9.0
    assert metrics["episode/words/trained_seconds/p95"] < 2.0
    assert metrics["episode/words/started_length_tokens/p50"] == 8.0
    assert metrics["episode/words/slow_bias"] == 1.0


def test_sources_are_told_apart() -> None:
    starvation = Starvation()
    for group in mixed(slow_trained=0, slow_lost=10):
        starvation.add("slow", group)
    for group in mixed(slow_trained=10, slow_lost=0):
        starvation.add("quick", group)
    metrics = starvation.metrics()
    assert (metrics["episode/slow/slow_bias"], metrics["episode/quick/slow_bias"]) == (1.0, 0.0)


def test_only_the_last_groups_count() -> None:
    starvation = Starvation()
    for group in mixed(slow_trained=0, slow_lost=10):
        starvation.add("words", group)
    for group in groups_of(GroupOutcome.TRAINED, WINDOW_GROUPS, seconds=1.0):
        starvation.add("words", group)
    assert starvation.metrics()["episode/words/slow_bias"] == 0.0


def played_group() -> Group:
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, 0))
    span = VersionSpan(0, 0)
    group.played = [
        PlayedEpisode("g0.0", "g0", span, build_episode(), seconds=2.0),
        PlayedEpisode("g0.1", "g0", span, failure=Failure("TaskError", ""), seconds=3.0),
        PlayedEpisode("g0.2", "g0", span, seconds=4.0),
    ]
    return group


def sample_of(episode: str) -> Any:
    return structs.replace(build_sample(id=f"{episode}/0/0"), episode_id=episode)


def test_a_group_with_a_kept_sample_trained() -> None:
    group = played_group()
    group.samples = [sample_of("g0.0"), sample_of("g0.9")]
    group.dropped = {"g0.9/0/0": STALE}
    time = group_time(group)
    assert time.outcome is GroupOutcome.TRAINED
    assert [episode.is_trained for episode in time.episodes] == [True, False, False]
    assert [episode.length_tokens for episode in time.episodes] == [4, None, None]
    assert time.seconds == 4.0


@pytest.mark.parametrize(
    ("reason", "outcome"), [(ABANDONED, GroupOutcome.TOO_SLOW), (RUN_ENDED, GroupOutcome.OTHER)]
)
def test_why_a_group_was_given_up_decides(reason: str, outcome: GroupOutcome) -> None:
    group = played_group()
    group.give_up(reason)
    assert group_time(group).outcome is outcome


def test_a_group_of_which_every_sample_was_stale_was_too_slow() -> None:
    group = played_group()
    group.samples = [sample_of("g0.0")]
    group.dropped = {"g0.0/0/0": STALE}
    assert group_time(group).outcome is GroupOutcome.TOO_SLOW


async def test_a_run_with_a_slow_task_shows_its_started_and_trained_times(build_rig: Any) -> None:
    async def wait(number: int) -> None:
        if number == 0:
            await asyncio.Event().wait()

    rig = build_rig(
        max_steps=6,
        max_lag=1,
        max_staleness=2,
        groups_per_batch=1,
        environment=ScriptedEnvironment(wait=wait),
        policy=ScriptedPolicy(),
    )
    await rig.play()
    metrics = rig.monitor.records[-1][1]
    assert metrics["episode/words/started_seconds/p50"] > 0
    assert metrics["episode/words/trained_length_tokens/p95"] == 4.0
    assert metrics["alarm/words/slow_tasks"] == 0.0

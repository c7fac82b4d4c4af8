"""Which failed episodes are played again, how often, and what a run shows of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from scripted_peers import ScriptedEnvironment, ScriptedPolicy

from gradus.config import ErrorPolicyConfig
from gradus.config.schema.environment import RETRIED_ERRORS
from gradus.errors import EnvironmentFailure
from gradus.orchestrator.failures import MAX_BACKOFF_SECONDS, ErrorPolicy
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.episode import FROM_OUTSIDE
from gradus.wire.versions import staleness


@pytest.mark.parametrize("kind", RETRIED_ERRORS)
def test_infrastructure_invalid_answers_and_deadlines_are_tried_again(kind: str) -> None:
    policy = ErrorPolicy(ErrorPolicyConfig())
    assert policy.wait_before_retry(Failure(kind, ""), retry=0) == 1.0


@pytest.mark.parametrize("kind", ["TaskError", "HarnessError", "invalid_reward", "EnvError"])
def test_an_error_that_is_not_on_the_list_is_final(kind: str) -> None:
    policy = ErrorPolicy(ErrorPolicyConfig())
    assert policy.wait_before_retry(Failure(kind, ""), retry=0) is None


def test_waits_double_up_to_a_minute_and_end_after_the_last_retry() -> None:
    policy = ErrorPolicy(ErrorPolicyConfig(retries=9, backoff_seconds=1.0))
    failure = Failure("ProviderError", "")
    waits = [policy.wait_before_retry(failure, retry=retry) for retry in range(10)]
    assert waits == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_SECONDS, 60, 60, None]


@pytest.mark.parametrize("kind", [*RETRIED_ERRORS, "TaskError", "", "never heard of"])
def test_every_failure_is_final_in_the_end(kind: str) -> None:
    policy = ErrorPolicy(ErrorPolicyConfig())
    waits = [policy.wait_before_retry(Failure(kind, ""), retry=n) for n in range(10_000)]
    first_final = waits.index(None)
    assert all(wait is None for wait in waits[first_final:])
    assert all(wait is not None and 0 <= wait < math.inf for wait in waits[:first_final])


def test_the_list_keeps_no_count() -> None:
    policy = ErrorPolicy(ErrorPolicyConfig())
    failure = Failure("episode_timeout", "")
    assert len({policy.wait_before_retry(failure, retry=0) for _ in range(5)}) == 1


def test_without_retries_everything_is_final() -> None:
    policy = ErrorPolicy(ErrorPolicyConfig(retries=0))
    assert policy.wait_before_retry(Failure("episode_timeout", ""), retry=0) is None


async def test_an_error_that_can_only_repeat_is_not_played_again(build_rig: Any) -> None:
    """A wrong key or a prompt that is too long gets the same answer each time."""
    refused = EpisodeFailed(Failure("ProviderError", "prompt too long", status_code=400))
    environment = ScriptedEnvironment(play=fails_first(2, refused))
    rig = build_rig(max_steps=1, environment=environment, errors={"retries": 2})
    await rig.play()
    assert rig.events("episode_retried") == []
    assert rig.monitor.records[0][1]["episode/words/error/ProviderError/sum"] == 2.0


def fails_first(times: int, result: Any) -> Any:
    """The first `times` episodes give `result`, the others are rewarded by turns."""

    def play(number: int) -> Any:
        return result if number < times else build_episode(reward=float(number % 2), seed=number)

    return play


@pytest.mark.shows("F51")
async def test_a_provider_error_is_tried_again_and_the_episode_trains(build_rig: Any) -> None:
    failed = EpisodeFailed(Failure("ProviderError", "refused"))
    environment = ScriptedEnvironment(play=fails_first(2, failed))
    rig = build_rig(max_steps=1, environment=environment, errors={"retries": 2})
    await rig.play()
    assert [line["error"] for line in rig.events("episode_retried")] == ["ProviderError"] * 2
    ended = rig.events("episode_ended")
    assert len({line["episode"] for line in ended}) == len(ended)
    metrics = rig.monitor.records[0][1]
    assert metrics["episode/words/retried/ProviderError/sum"] == 2.0
    assert metrics["episode/error/share"] == 0.0
    assert metrics["batch/samples/sum"] == 4.0
    seeds = {call.seed for call in environment.calls}
    assert len(seeds) == len(environment.calls)


@pytest.mark.shows("F06")
async def test_an_episode_that_was_lost_comes_again_with_its_seed_and_all_its_retries(
    build_rig: Any,
) -> None:
    failures = [
        *(Failure("EnvironmentLost", f"worker {n} was killed {FROM_OUTSIDE}") for n in range(3)),
        Failure("ProviderError", "refused"),
    ]

    def play(number: int) -> Any:
        if number < len(failures):
            return EpisodeFailed(failures[number])
        return build_episode(reward=float(number % 2), seed=number)

    environment = ScriptedEnvironment(play=play)
    rig = build_rig(
        max_steps=1,
        group_size=2,
        groups_per_batch=1,
        max_in_flight_episodes=1,
        environment=environment,
        errors={"retries": 1},
    )
    await rig.play()
    seeds = [call.seed for call in environment.calls]
    assert len({*seeds[:4]}) == 1
    assert seeds[4] != seeds[0]
    episodes = [line["episode"] for line in rig.events("episode_retried")]
    assert episodes == ["g000000.0"] * 4
    assert rig.monitor.records[0][1]["episode/error/share"] == 0.0


async def test_an_error_inside_the_episode_is_judged_like_one_outside(build_rig: Any) -> None:
    broken = build_episode([build_trace(error="SandboxError")])
    rig = build_rig(
        max_steps=1,
        environment=ScriptedEnvironment(play=fails_first(1, broken)),
        errors={"retries": 1},
    )
    await rig.play()
    assert len(rig.events("episode_retried")) == 1


async def test_after_the_last_retry_the_error_is_recorded_by_its_type(build_rig: Any) -> None:
    failed = EpisodeFailed(Failure("ProviderError", "refused"))
    rig = build_rig(
        environment=ScriptedEnvironment(play=lambda _: failed),
        errors={"retries": 1},
        max_empty_attempts=1,
    )
    with pytest.raises(EnvironmentFailure, match="4 x error:ProviderError"):
        await rig.play()
    failed_ones = [line for line in rig.events("episode_ended") if line["outcome"] == "failed"]
    retried = [line["episode"] for line in rig.events("episode_retried")]
    assert {line["error"] for line in failed_ones} == {"ProviderError"}
    assert all(retried.count(line["episode"]) == 1 for line in failed_ones)


@pytest.mark.shows("F51")
async def test_a_bug_of_the_task_is_never_tried_again(build_rig: Any) -> None:
    failed = EpisodeFailed(Failure("TaskError", "bug"))
    rig = build_rig(
        max_steps=1,
        group_size=3,
        environment=ScriptedEnvironment(play=fails_first(1, failed)),
        errors={"retries": 5},
    )
    await rig.play()
    assert rig.events("episode_retried") == []
    assert rig.monitor.records[0][1]["episode/words/error/TaskError/sum"] == 1.0


async def test_a_source_chooses_its_own_list(build_rig: Any) -> None:
    failed = EpisodeFailed(Failure("Flaky", "again"))
    rig = build_rig(
        max_steps=1,
        environment=ScriptedEnvironment(play=fails_first(1, failed)),
        errors={"retries": 1, "retry_on": ["Flaky"]},
    )
    await rig.play()
    assert len(rig.events("episode_retried")) == 1


async def test_a_retried_episode_is_as_old_as_its_last_attempt(build_rig: Any) -> None:
    """The first attempt hangs while three versions pass; without its retry it would be too old."""
    served = asyncio.Event()

    async def wait(number: int) -> None:
        if number == 0:
            await served.wait()

    async def apply(version: int) -> None:
        if version == 2:
            served.set()

    def play(number: int) -> Any:
        if number == 0:
            return EpisodeFailed(Failure("ProviderError", "refused"))
        return build_episode(reward=float(number % 2), seed=number)

    rig = build_rig(
        max_steps=6,
        max_lag=1,
        max_staleness=2,
        groups_per_batch=1,
        environment=ScriptedEnvironment(play=play, wait=wait),
        policy=ScriptedPolicy(wait=apply),
        errors={"retries": 1},
    )
    await rig.play()
    (retried,) = rig.events("episode_retried")
    assert retried["version"] >= 1
    ages = [staleness(batch.step, batch.versions) for batch in rig.trainer.batches]
    assert max(ages) <= 2


async def test_an_episode_that_waits_for_its_retry_can_be_given_up(build_rig: Any) -> None:
    failed = EpisodeFailed(Failure("ProviderError", "refused"))
    environment = ScriptedEnvironment(play=fails_first(1, failed))
    rig = build_rig(
        max_steps=5,
        max_lag=1,
        max_staleness=1,
        groups_per_batch=1,
        environment=environment,
        errors={"retries": 1, "backoff_seconds": 60.0},
    )
    await rig.play()
    (abandoned,) = rig.events("group_abandoned")
    assert abandoned["group"] == "g000000"
    outcomes = {line["episode"]: line["outcome"] for line in rig.events("episode_ended")}
    assert outcomes["g000000.0"] == "cancelled"


def test_the_loss_of_its_process_costs_an_episode_no_retry() -> None:
    lost = Failure("EnvironmentLost", "worker process 7 was stopped")
    assert ErrorPolicy(ErrorPolicyConfig(retries=0)).wait_before_retry(lost, retry=0) is not None
    others = ErrorPolicyConfig(retries=0, retry_on=["SandboxError"])
    assert ErrorPolicy(others).wait_before_retry(lost, retry=0) is None

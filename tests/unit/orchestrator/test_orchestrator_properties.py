"""Invariants 4 and 5 over whole runs: any waits, any failures, any limits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mishaps import FailureProfile
from scripted_peers import ScriptedEnvironment, ScriptedPolicy, ScriptedTrainer

from gradus.errors import EmptyBatchError, EnvironmentFailure
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.wire.versions import staleness


def random_wait(seed: int, most: int) -> Any:
    """A wait of up to `most` turns of the event loop, the same for the same number."""

    async def wait(number: int) -> None:
        for _ in range(random.Random(f"{seed}/{number}").randrange(most + 1)):
            await asyncio.sleep(0)

    return wait


def random_play(seed: int) -> Any:
    """Rewards 0 or 1; one episode in eight never comes, one in four comes with something wrong."""
    profile = FailureProfile(share=0.25)

    def play(number: int) -> Any:
        source = random.Random(f"{seed}/{number}")
        if source.random() < 0.125:
            return EpisodeFailed(Failure("ProviderError", "refused"))
        return profile.play(source.randrange(1 << 31))

    return play


@pytest.mark.shows("I1", "I3")
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10_000),
    max_lag=st.integers(0, 2),
    slack=st.integers(0, 2),
    groups_per_batch=st.integers(1, 3),
    group_size=st.integers(2, 4),
    max_in_flight=st.integers(1, 16),
    episode_turns=st.sampled_from([0, 10, 100]),
    trainer_turns=st.sampled_from([0, 10, 100]),
)
async def test_any_run_conserves_its_episodes_and_keeps_the_staleness_bound(
    build_rig: Any,
    seed: int,
    max_lag: int,
    slack: int,
    groups_per_batch: int,
    group_size: int,
    max_in_flight: int,
    episode_turns: int,
    trainer_turns: int,
) -> None:
    max_steps = 4
    rig = build_rig(
        max_steps=max_steps,
        max_lag=max_lag,
        max_staleness=max_lag + slack,
        groups_per_batch=groups_per_batch,
        group_size=group_size,
        max_in_flight_episodes=max_in_flight,
        max_empty_attempts=50,
        environment=ScriptedEnvironment(
            play=random_play(seed), wait=random_wait(seed, episode_turns)
        ),
        policy=ScriptedPolicy(wait=random_wait(seed + 1, 5)),
        trainer=ScriptedTrainer(max_steps=max_steps, wait=random_wait(seed + 2, trainer_turns)),
    )
    try:
        await rig.play()
    except (EmptyBatchError, EnvironmentFailure):
        return
    assert [batch.step for batch in rig.trainer.batches] == list(range(max_steps))
    for batch in rig.trainer.batches:
        assert staleness(batch.step, batch.versions) <= max_lag + slack
    assert_every_episode_ends_once(rig)
    assert_every_sample_trains_once(rig)
    assert_lag_is_bounded(rig, (max_lag + 1) * groups_per_batch)


def assert_every_episode_ends_once(rig: Any) -> None:
    started = [line["episode"] for line in rig.events("episode_started")]
    ended = [line["episode"] for line in rig.events("episode_ended")]
    assert len(set(started)) == len(started)
    assert Counter(ended) == Counter(started)


def assert_every_sample_trains_once(rig: Any) -> None:
    finished = {
        line["episode"] for line in rig.events("episode_ended") if line["outcome"] == "finished"
    }
    trained = [sample for line in rig.events("batch_shipped") for sample in line["samples"]]
    assert len(set(trained)) == len(trained)
    assert {sample.split("/")[0] for sample in trained} <= finished
    sent = [i for b in rig.trainer.batches for rank in b.ranks for m in rank for i in m.sample_ids]
    assert sorted(sent) == sorted(trained)


def assert_lag_is_bounded(rig: Any, slots: int) -> None:
    """Replays the journal: open groups that are not trained yet never exceed the slots."""
    held: set[str] = set()
    shipped: dict[int, list[str]] = {}
    for line in rig.journal:
        match line["event"]:
            case "group_opened":
                held.add(line["group"])
                assert len(held) <= slots
            case "group_dropped" | "group_abandoned":
                held.discard(line["group"])
            case "batch_shipped":
                shipped[line["step"]] = line["groups"]
            case "policy_applied":
                trained = [g for step, g in shipped.items() if step < line["version"]]
                held.difference_update(*trained)

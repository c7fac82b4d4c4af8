"""Which episode starts next, and how a batch is packed."""

from __future__ import annotations

import numpy as np
import pytest
from builders import build_sample

from gradus.errors import EmptyBatchError, ProtocolError
from gradus.orchestrator.groups.packing import Layout, build_batch
from gradus.orchestrator.play.concurrency import AdmissionRate, Scheduler
from gradus.wire.versions import VersionSpan


def starting(scheduler: Scheduler) -> list[str]:
    found = []
    while (planned := scheduler.next_episode()) is not None:
        found.append(planned.id)
    return found


def test_older_groups_start_first_and_the_limit_holds() -> None:
    scheduler = Scheduler(max_in_flight=3)
    scheduler.plan("g0", ["g0.0", "g0.1"])
    scheduler.plan("g1", ["g1.0", "g1.1"])
    assert starting(scheduler) == ["g0.0", "g0.1", "g1.0"]
    assert starting(scheduler) == []
    scheduler.ended()
    assert starting(scheduler) == ["g1.1"]


def test_a_group_is_wanted_only_when_its_first_episode_could_start() -> None:
    scheduler = Scheduler(max_in_flight=1)
    assert scheduler.wants_group
    scheduler.plan("g0", ["g0.0"])
    assert not scheduler.wants_group
    starting(scheduler)
    assert not scheduler.wants_group
    scheduler.ended()
    assert scheduler.wants_group


def test_planned_episodes_of_an_abandoned_group_never_start() -> None:
    scheduler = Scheduler(max_in_flight=9)
    scheduler.plan("g0", ["g0.0"])
    scheduler.plan("g1", ["g1.0"])
    scheduler.forget("g0")
    assert starting(scheduler) == ["g1.0"]


def test_an_end_without_a_start_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        Scheduler(max_in_flight=1).ended()


def test_a_batch_spans_the_versions_of_its_samples_on_every_rank() -> None:
    samples = [
        build_sample(seed=0, versions=VersionSpan(1, 2)),
        build_sample(seed=1, versions=VersionSpan(2, 3)),
    ]
    batch = build_batch(samples, step=3, term=7, layout=Layout(num_ranks=2, max_tokens=64))
    assert (batch.step, batch.term, batch.versions) == (3, 7, VersionSpan(1, 3))
    assert [len(rank) for rank in batch.ranks] == [1, 1]


@pytest.mark.shows("F48")
def test_an_empty_batch_is_never_built() -> None:
    with pytest.raises(EmptyBatchError):
        build_batch([], step=0, term=1, layout=Layout(1, 64))


def test_a_number_that_is_not_finite_is_stopped_before_it_is_packed() -> None:
    sample = build_sample()
    spoiled = sample.with_arrays(advantages=np.full(len(sample), np.nan, np.float32))
    with pytest.raises(ProtocolError, match="advantages holds a value that is not finite"):
        build_batch([spoiled], step=0, term=1, layout=Layout(1, 64))


def test_the_rate_holds_the_next_start_back_until_its_time() -> None:
    scheduler = Scheduler(max_in_flight=9, rate=AdmissionRate(per_minute=60))
    scheduler.plan("g0", ["g0.0", "g0.1"])
    assert scheduler.next_episode(now=0.0) is not None
    assert scheduler.next_episode(now=0.5) is None
    assert scheduler.wait_seconds(now=0.5) == 0.5
    assert scheduler.next_episode(now=1.0) is not None


def test_a_lower_limit_lets_running_episodes_go_on_and_starts_none() -> None:
    scheduler = Scheduler(max_in_flight=3)
    scheduler.plan("g0", ["g0.0", "g0.1", "g0.2", "g0.3"])
    assert len(starting(scheduler)) == 3
    scheduler.max_in_flight = 1
    for _ in range(2):
        scheduler.ended()
        assert starting(scheduler) == []
    scheduler.ended()
    assert starting(scheduler) == ["g0.3"]

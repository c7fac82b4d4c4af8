"""The queue of ready groups, the last staleness check, and the end when nothing trains."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from builders import build_sample
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import EmptyBatchError, EnvironmentFailure, SolvedError, StalledError
from gradus.orchestrator.groups.batcher import LAST_GROUPS, Batcher, ReadyGroup, normalized
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan, staleness


def sample_of(version: int, name: str) -> Sample:
    return build_sample(id=name, versions=VersionSpan(version, version))


def group_of(number: int, *versions: int) -> ReadyGroup:
    samples = [sample_of(v, f"g{number}.{i}/0/0") for i, v in enumerate(versions)]
    return ReadyGroup(f"g{number}", tuple(samples))


def build_batcher(**changes: int) -> Batcher:
    settings = {"groups_per_batch": 2, "max_staleness": 1, "max_empty_attempts": 2}
    return Batcher(**(settings | changes))


async def test_a_batch_is_ready_when_it_has_its_groups() -> None:
    batcher = build_batcher()
    waiting = asyncio.create_task(batcher.next_batch())
    batcher.add(group_of(0, 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    batcher.add(group_of(1, 0))
    batch = await waiting
    assert (batch.step, batch.group_ids) == (0, ["g0", "g1"])
    assert batcher.step == 1


async def test_a_batch_is_in_the_order_of_its_groups_whichever_arrived_first() -> None:
    batcher = build_batcher()
    for number in (1, 0):
        batcher.add(group_of(number, 0))
    assert (await batcher.next_batch()).group_ids == ["g0", "g1"]


async def test_what_is_left_over_begins_the_next_batch() -> None:
    batcher = build_batcher(groups_per_batch=1)
    for number in range(2):
        batcher.add(group_of(number, 0))
    assert (await batcher.next_batch()).group_ids == ["g0"]
    assert (await batcher.next_batch()).group_ids == ["g1"]


@pytest.mark.shows("F46")
async def test_samples_too_old_for_the_next_step_are_left_out() -> None:
    batcher = build_batcher(groups_per_batch=1, max_staleness=0)
    batcher.add(group_of(0, 0))
    await batcher.next_batch()
    stale = batcher.add(group_of(1, 0, 1))
    assert [sample.id for sample in stale.samples] == ["g1.0/0/0"]
    assert stale.group_ids == []
    assert [sample.id for sample in (await batcher.next_batch()).samples] == ["g1.1/0/0"]


def test_a_group_of_which_nothing_is_left_is_reported() -> None:
    batcher = build_batcher(max_staleness=0)
    batcher.state.step = 1
    stale = batcher.add(group_of(0, 0, 0))
    assert stale.group_ids == ["g0"]
    assert len(stale.samples) == 2


async def test_groups_that_became_too_old_while_they_waited_go() -> None:
    batcher = build_batcher(groups_per_batch=1, max_staleness=0)
    for number in range(2):
        batcher.add(group_of(number, 0))
    await batcher.next_batch()
    assert batcher.drop_stale().group_ids == ["g1"]
    waiting = asyncio.create_task(batcher.next_batch())
    await asyncio.sleep(0)
    assert not waiting.done()
    batcher.add(group_of(2, 1))
    assert (await waiting).group_ids == ["g2"]


async def test_a_group_of_a_version_whose_batch_is_cut_again_waits_behind_it() -> None:
    batcher = build_batcher(groups_per_batch=1, max_staleness=1)
    batcher.restore([group_of(0, 0)])
    span = VersionSpan(0, 1)
    late = ReadyGroup("g1", (sample_of(1, "a"), build_sample(id="b", versions=span)))
    assert batcher.add(late).samples == []
    too_old = ReadyGroup("g2", (build_sample(id="c", versions=VersionSpan(0, 2)),))
    assert batcher.add(too_old).group_ids == ["g2"]
    assert (await batcher.next_batch()).group_ids == ["g0"]
    assert batcher.drop_stale().samples == []
    assert (await batcher.next_batch()).group_ids == ["g1"]


@pytest.mark.shows("F46", "I3")
@given(
    versions=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), max_size=20),
    max_staleness=st.integers(0, 3),
)
async def test_no_batch_ever_holds_a_sample_beyond_the_bound(
    versions: list[list[int]], max_staleness: int
) -> None:
    batcher = build_batcher(max_staleness=max_staleness, max_empty_attempts=1000)
    for number, ages in enumerate(versions):
        batcher.add(group_of(number, *(min(age, batcher.step) for age in ages)))
        filling = asyncio.create_task(batcher.next_batch())
        await asyncio.sleep(0)
        if not filling.done():
            filling.cancel()
            continue
        batch = filling.result()
        batcher.drop_stale()
        assert batch.samples
        assert all(staleness(batch.step, s.versions) <= max_staleness for s in batch.samples)


def reject(batcher: Batcher, times: int, reason: str = "zero_advantage", **more: Any) -> None:
    for _ in range(times):
        batcher.reject({reason: 2}, **more)


@pytest.mark.shows("F47")
@pytest.mark.parametrize("groups_per_batch", [1, 8, 128])
def test_a_run_goes_on_while_any_of_the_last_groups_trained(groups_per_batch: int) -> None:
    batcher = build_batcher(groups_per_batch=groups_per_batch)
    most = max(LAST_GROUPS, 2 * groups_per_batch)
    for number in range(3):
        reject(batcher, most - 1)
        batcher.add(group_of(number, 0))
    reject(batcher, most - 1)
    with pytest.raises(StalledError, match=rf"in {most} groups in a row.*{2 * most} x zero_adv"):
        reject(batcher, 1)


def test_flat_groups_are_told_of_once_for_each_doubling_of_their_number() -> None:
    told: list[str] = []
    batcher = Batcher(groups_per_batch=4, max_staleness=1, max_empty_attempts=3, tell=told.append)
    for number, times in enumerate([11, 12, 13, 23, 60]):
        reject(batcher, times)
        batcher.add(group_of(number, 0))
    assert [int(re.findall(r"\d+", line)[0]) for line in told] == [12, 24, 48]


@pytest.mark.parametrize(
    ("reason", "kind", "advice"),
    [
        ("zero_advantage", StalledError, "use easier or harder tasks"),
        ("stale", EmptyBatchError, "raise orchestrator.max_staleness"),
        ("no_trainable_tokens", EmptyBatchError, "records in episodes/"),
    ],
)
def test_the_end_and_its_advice_fit_the_commonest_reason(
    reason: str, kind: type[EmptyBatchError], advice: str
) -> None:
    batcher = build_batcher()
    reject(batcher, LAST_GROUPS - 1, reason)
    with pytest.raises(EmptyBatchError, match=advice) as caught:
        batcher.reject({"gibberish": 1, "error:ProviderError": 1000})
    assert type(caught.value) is kind
    said = str(caught.value)
    assert said.index("ProviderError") < said.index(reason)


def test_nothing_but_errors_is_the_environment_s_failure() -> None:
    batcher = build_batcher(max_empty_attempts=1)
    batcher.reject({"error:SandboxError": 1, "error:ProviderError": 3})
    with pytest.raises(EnvironmentFailure, match="4 x error:ProviderError, 1 x error:SandboxError"):
        batcher.reject({"error:ProviderError": 1})
    reject(batcher, 50)
    batcher.reject({"error:ProviderError": 1})
    with pytest.raises(EnvironmentFailure):
        batcher.reject({"error:ProviderError": 1})


def test_a_reward_that_fails_on_all_that_was_played_ends_the_run_at_once() -> None:
    batcher = build_batcher(groups_per_batch=16, max_empty_attempts=3)
    batcher.reject({"error:RewardError": 4})
    with pytest.raises(EnvironmentFailure, match=r"2 groups in a row.*reward 'score' failed"):
        batcher.reject({"error:RewardError": 4}, last="reward 'score' failed")


def test_a_reward_that_fails_on_some_tasks_ends_no_run_at_once() -> None:
    batcher = build_batcher(groups_per_batch=16, max_empty_attempts=3)
    batcher.add(group_of(1, 0))
    for _ in range(40):
        batcher.reject({"error:RewardError": 4})


@pytest.mark.parametrize(("num_solved", "is_solved"), [(200, True), (150, True), (149, False)])
def test_a_run_whose_tasks_are_nearly_all_solved_has_a_good_end(
    num_solved: int, is_solved: bool
) -> None:
    batcher = build_batcher()
    reject(batcher, LAST_GROUPS - num_solved)
    with pytest.raises(EmptyBatchError) as caught:
        reject(batcher, num_solved, rewards=[1.0] * 2, is_solved=True)
    assert isinstance(caught.value, SolvedError) is is_solved
    assert ("nearly solved" in str(caught.value)) is (num_solved == 150)


def test_a_run_with_errors_among_solved_groups_is_not_solved() -> None:
    batcher = build_batcher()
    reject(batcher, 1, "error:TaskError")
    with pytest.raises(StalledError):
        reject(batcher, LAST_GROUPS - 1, rewards=[1.0, 1.0], is_solved=True)


async def test_a_frozen_group_never_becomes_stale_and_trains_at_the_version_of_its_step() -> None:
    batcher = build_batcher(groups_per_batch=1, max_staleness=0)
    batcher.state.step = 5
    frozen = ReadyGroup("g0", (sample_of(0, "g0.0/0/0"),), is_frozen=True)
    assert batcher.add(frozen).samples == []
    assert batcher.drop_stale().samples == []
    (sample,) = (await batcher.next_batch()).samples
    assert sample.versions == VersionSpan(5, 5)


def credited(number: int, advantages: list[float]) -> ReadyGroup:
    samples = tuple(
        build_sample(6, prompt_length=2, id=f"g{number}.{i}/0/0", advantage=advantage)
        for i, advantage in enumerate(advantages)
    )
    return ReadyGroup(f"g{number}", samples)


async def test_advantages_are_divided_by_their_deviation_over_the_batch() -> None:
    """Over both groups: 3, -3, 1 and -1 deviate by the root of 5."""
    batcher = build_batcher(normalizes=True)
    batcher.add(credited(0, [3.0, -3.0]))
    batcher.add(credited(1, [1.0, -1.0]))
    samples = (await batcher.next_batch()).samples
    expected = np.array([3.0, -3.0, 1.0, -1.0]) / np.sqrt(5.0)
    assert [float(s.arrays.advantages[-1]) for s in samples] == pytest.approx(expected.tolist())
    assert all(not s.arrays.advantages[:2].any() for s in samples)


def test_only_members_of_rl_count_in_the_deviation_of_a_batch() -> None:
    group = credited(0, [2.0, -2.0, 100.0])
    outside = group.samples[2].with_arrays(loss_weights={"rl": np.zeros(6, np.float32)})
    (found,) = normalized([ReadyGroup("g0", (*group.samples[:2], outside))])
    assert [float(s.arrays.advantages[-1]) for s in found.samples] == [1.0, -1.0, 50.0]


@pytest.mark.parametrize("advantages", [[0.5, 0.5], [0.3, 0.3 + 3e-8], [0.0, 0.0]])
def test_advantages_that_do_not_differ_stay_as_they_are(advantages: list[float]) -> None:
    group = credited(0, advantages)
    assert normalized([group]) == (group,)

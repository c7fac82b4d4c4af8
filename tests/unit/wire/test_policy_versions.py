"""Versions count optimizer updates; staleness has one definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.wire.versions import NOT_SAMPLED, VersionSpan, by_token, read_runs, runs_of, staleness

versions = st.integers(min_value=0, max_value=10_000)


def spans() -> st.SearchStrategy[VersionSpan]:
    return st.tuples(versions, versions).map(lambda pair: VersionSpan(min(pair), max(pair)))


def test_a_sample_of_the_trained_version_is_not_stale() -> None:
    assert staleness(3, VersionSpan(oldest=3, newest=3)) == 0


def test_staleness_counts_from_the_oldest_sampling_version() -> None:
    assert staleness(5, VersionSpan(oldest=2, newest=4)) == 3


def test_a_version_cannot_train_tokens_of_a_later_one() -> None:
    with pytest.raises(ValueError, match="newer version 4"):
        staleness(3, VersionSpan(oldest=3, newest=4))


@pytest.mark.parametrize(("oldest", "newest"), [(-1, 0), (2, 1)])
def test_a_span_runs_forwards_from_zero(oldest: int, newest: int) -> None:
    with pytest.raises(ValueError, match="must satisfy"):
        VersionSpan(oldest=oldest, newest=newest)


@given(spans(), st.integers(0, 100))
def test_staleness_is_never_negative(span: VersionSpan, ahead: int) -> None:
    assert staleness(span.newest + ahead, span) >= ahead


@given(spans(), spans())
def test_a_merged_span_covers_both(first: VersionSpan, second: VersionSpan) -> None:
    merged = first.merge(second)
    assert merged == second.merge(first)
    assert merged.oldest == min(first.oldest, second.oldest)
    assert merged.newest == max(first.newest, second.newest)


@given(st.lists(st.integers(NOT_SAMPLED, 3), max_size=20))
def test_runs_are_the_versions_of_the_tokens_and_none_is_empty(tokens: list[int]) -> None:
    runs = runs_of(np.array(tokens, np.int32))
    assert by_token(runs).tolist() == tokens
    assert all(count > 0 for _, count in runs)
    assert all(one[0] != next_one[0] for one, next_one in itertools.pairwise(runs))


def test_the_tokens_narrow_the_span_of_their_episode_and_never_widen_it() -> None:
    span = VersionSpan(oldest=4, newest=7)
    assert span.within(np.array([NOT_SAMPLED, 5, 6], np.int32)) == VersionSpan(5, 6)
    assert span.within(np.array([NOT_SAMPLED, 2, 9], np.int32)) == span
    assert span.within(np.array([9], np.int32)) == VersionSpan(7, 7)
    assert span.within(np.array([NOT_SAMPLED], np.int32)) == span


NO_RUNS_OF_THREE: list[object] = [
    *(None, 3, "8", {}, [[8]], [[8, 2, 1]], [[8, "3"]], [[8.5, 3]], [[-1, 3]], [[1 << 40, 3]]),
    *([[8, 2]], [[8, 4]], [[8, 4], [9, -1]], [[8, 3], [9, 0]]),
]


@pytest.mark.parametrize("noted", NO_RUNS_OF_THREE)
def test_what_does_not_fit_a_reply_of_three_tokens_says_nothing_of_it(noted: object) -> None:
    assert read_runs(noted, 3) is None
    assert read_runs([[8, 1], [9, 2]], 3) == [(8, 1), (9, 2)]

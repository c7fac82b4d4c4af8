"""Versions count optimizer updates; staleness has one definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.wire.versions import VersionSpan, staleness

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

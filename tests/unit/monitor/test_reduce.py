"""Partials merge in any order and are reduced once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.monitor.reduce import Max, Mean, Min, Partials, Sum

values = st.lists(st.integers(-1000, 1000).map(float), min_size=1)


def test_each_kind_reduces_as_its_name_says() -> None:
    partials = Partials()
    for value in (1.0, 2.0, 6.0):
        partials.add("a/mean", Mean(value))
        partials.add("a/sum", Sum(value))
        partials.add("a/max", Max(value))
        partials.add("a/min", Min(value))
    assert partials.reduce() == {"a/mean": 3.0, "a/sum": 9.0, "a/max": 6.0, "a/min": 1.0}


def test_a_mean_is_weighted() -> None:
    partials = Partials()
    partials.add("a/mean", Mean(total=10.0, weight=10.0))
    partials.add("a/mean", Mean(total=0.0, weight=30.0))
    assert partials.reduce() == {"a/mean": 0.25}


def test_a_mean_of_nothing_is_left_out() -> None:
    partials = Partials()
    partials.add("a/mean", Mean.of([]))
    assert partials.reduce() == {}


def test_two_kinds_under_one_key_are_refused() -> None:
    partials = Partials()
    partials.add("a", Mean(1.0))
    with pytest.raises(ValueError, match="metric 'a' is a Mean, cannot merge a Sum into it"):
        partials.add("a", Sum(1.0))


@given(parts=st.lists(values, min_size=1))
def test_parts_reduce_to_the_same_as_the_whole(parts: list[list[float]]) -> None:
    whole = [value for part in parts for value in part]
    total = Partials()
    for part in reversed(parts):
        one = Partials()
        one.add("mean", Mean.of(part))
        one.add("sum", Sum(sum(part)))
        one.add("max", Max(max(part)))
        one.add("min", Min(min(part)))
        total.merge(one)
    assert total.reduce() == {
        "mean": pytest.approx(sum(whole) / len(whole)),
        "sum": sum(whole),
        "max": max(whole),
        "min": min(whole),
    }

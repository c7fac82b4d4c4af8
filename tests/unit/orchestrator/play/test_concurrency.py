"""The in-flight limit as tables of loads, and the rate of starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checkpoints import reread
from hypothesis import given
from hypothesis import strategies as st

from gradus.orchestrator.play.concurrency import (
    AdmissionRate,
    InFlightController,
    LimitState,
    Load,
    build_controller,
)

CALM = Load(in_flight=40, num_ended=1000, running=40, waiting=0, kv_usage=0.3, preemptions=0)


def controller(initial: int = 40, *, least: int = 1, most: int = 1000) -> InFlightController:
    return InFlightController(least=least, most=most, initial=initial)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 50),
        ({"kv_usage": 0.59}, 50),
        ({"kv_usage": 0.6}, 40),
        ({"waiting": 1}, 40),
        ({"in_flight": 36}, 50),
        ({"in_flight": 35}, 40),
        ({"num_ended": 39}, 40),
        ({"num_ended": 40}, 50),
        ({"kv_usage": 0.8}, 40),
        ({"kv_usage": 0.875}, 32),
        ({"kv_usage": 0.9}, 31),
        ({"kv_usage": 1.0}, 20),
        ({"kv_usage": 0.95, "in_flight": 19}, 10),
        ({"kv_usage": 0.85, "in_flight": 60}, 40),
    ],
)
def test_one_poll_moves_the_limit_by_the_table(changes: dict[str, float], limit: int) -> None:
    assert controller().observe(replace(CALM, **changes)) == limit


def test_growth_waits_for_as_many_ends_as_the_new_limit() -> None:
    limits = controller()
    assert limits.observe(CALM) == 50
    assert limits.observe(replace(CALM, in_flight=50, num_ended=1049)) == 50
    assert limits.observe(replace(CALM, in_flight=50, num_ended=1050)) == 62


def test_a_limit_of_one_grows_too() -> None:
    assert controller(1).observe(replace(CALM, in_flight=1)) == 2


def test_a_trim_repeated_under_the_same_load_changes_nothing_more() -> None:
    limits = controller(100)
    full = replace(CALM, in_flight=100, kv_usage=0.875)
    assert limits.observe(full) == 80
    assert limits.observe(full) == 80
    assert limits.observe(replace(full, in_flight=80, kv_usage=0.7)) == 80


def test_a_preemption_cuts_once_and_older_ones_do_not_count() -> None:
    limits = controller(100)
    busy = replace(CALM, kv_usage=0.7, preemptions=7)
    assert limits.observe(busy) == 100
    assert limits.observe(replace(busy, preemptions=8)) == 80
    assert limits.observe(replace(busy, preemptions=8)) == 80


def test_preemptions_of_an_engine_that_was_started_anew_do_not_cut() -> None:
    limits = controller(100)
    limits.observe(replace(CALM, kv_usage=0.7, preemptions=7))
    assert limits.observe(replace(CALM, kv_usage=0.7, preemptions=0)) == 100


def test_six_polls_of_a_long_queue_cut_a_little_and_six_more_by_half() -> None:
    limits = controller(100)
    queued = replace(CALM, running=10, waiting=6)
    assert [limits.observe(queued) for _ in range(12)] == [100] * 5 + [90] * 6 + [45]


def test_a_queue_that_was_short_in_between_begins_to_count_again() -> None:
    limits = controller(100)
    queued = replace(CALM, running=10, waiting=6)
    for _ in range(5):
        limits.observe(queued)
    assert limits.observe(replace(queued, waiting=5)) == 100
    assert [limits.observe(queued) for _ in range(6)] == [100] * 5 + [90]


def test_a_queue_that_comes_back_later_is_cut_a_little_again() -> None:
    limits = controller(100)
    queued, short = replace(CALM, running=10, waiting=6), replace(CALM, running=10, waiting=1)
    for _ in range(6):
        limits.observe(queued)
    limits.observe(short)
    assert [limits.observe(queued) for _ in range(6)][-1] == 81


def test_the_strongest_of_several_cuts_holds() -> None:
    limits = controller(100)
    limits.observe(replace(CALM, kv_usage=0.7))
    assert limits.observe(replace(CALM, in_flight=100, kv_usage=0.875, preemptions=1)) == 80
    assert limits.observe(replace(CALM, in_flight=80, kv_usage=1.0, preemptions=2)) == 40


def test_equal_bounds_fix_the_limit() -> None:
    limits = controller(8, least=8, most=8)
    for load in (CALM, replace(CALM, kv_usage=1.0), replace(CALM, preemptions=5)):
        assert limits.observe(load) == 8


loads = st.builds(
    Load,
    in_flight=st.integers(0, 500),
    num_ended=st.integers(0, 5000),
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    kv_usage=st.floats(0, 1),
    preemptions=st.integers(0, 50),
)


@given(st.lists(loads, max_size=40), st.integers(1, 50), st.integers(0, 200))
def test_the_limit_never_leaves_its_bounds(polls: list[Load], least: int, room: int) -> None:
    limits = controller(70, least=least, most=least + room)
    for load in polls:
        assert least <= limits.observe(load) <= least + room


def simulate(capacity: int, *, polls: int) -> list[tuple[int, float]]:
    """An engine whose cache holds `capacity` episodes: limit and usage after each poll."""
    limits = controller(10, most=10_000)
    ended, seen = 0, []
    for _ in range(polls):
        in_flight = limits.limit
        usage = min(1.0, in_flight / capacity)
        ended += in_flight
        queue = max(0, in_flight - capacity)
        limits.observe(Load(in_flight, ended, min(in_flight, capacity), queue, usage, 0))
        seen.append((limits.limit, usage))
    return seen


@pytest.mark.parametrize("capacity", [30, 100, 1000, 5000])
def test_the_limit_finds_an_engine_s_capacity_and_stays_there(capacity: int) -> None:
    settled = simulate(capacity, polls=60)[-20:]
    assert len({limit for limit, _ in settled}) == 1
    assert all(0.6 <= usage <= 0.8 for _, usage in settled)


def test_the_limit_goes_on_after_a_restart() -> None:
    limits = controller()
    limits.observe(CALM)
    resumed = controller()
    resumed.state = reread(limits.state)
    assert resumed.limit == 50
    narrower = controller(20, most=30)
    narrower.state = limits.state
    assert narrower.limit == 30


@pytest.mark.parametrize(("num_servers", "limit"), [(4, 400), (1, 100), (8, 800)])
def test_a_limit_that_is_restored_is_for_the_servers_it_was_found_with(
    num_servers: int, limit: int
) -> None:
    limits = controller(100)
    limits.observe(replace(CALM, in_flight=0))
    assert limits.observe(replace(CALM, in_flight=0, num_servers=4)) == 400
    resumed = InFlightController(least=1, most=1000, initial=100, num_servers=1)
    resumed.state = reread(limits.state)
    assert resumed.observe(replace(CALM, num_servers=num_servers)) == limit


def test_a_limit_that_is_restored_grows_after_one_turnover() -> None:
    resumed = controller()
    resumed.state = LimitState(40, 1)
    assert resumed.observe(CALM) == 40
    assert resumed.observe(replace(CALM, num_ended=1039)) == 40
    assert resumed.observe(replace(CALM, num_ended=1040)) == 50


@pytest.mark.parametrize(("kv_capacity_tokens", "limit"), [(6400, 100), (0, 256), (10**9, 256)])
def test_the_first_limit_is_what_the_cache_holds_in_full_length(
    kv_capacity_tokens: int, limit: int, build_rig: Any
) -> None:
    config = build_rig(max_in_flight_episodes=256).config
    assert config.model.max_length_tokens == 64
    assert build_controller(config, kv_capacity_tokens).limit == limit


def test_starts_are_spread_evenly_and_idle_time_saves_nothing_up() -> None:
    rate = AdmissionRate(per_minute=30)
    rate.take(now=0.0)
    assert rate.wait_seconds(now=0.5) == 1.5
    rate.take(now=100.0)
    assert rate.wait_seconds(now=100.0) == 2.0


def test_without_a_rate_nothing_waits() -> None:
    rate = AdmissionRate(per_minute=None)
    for _ in range(1000):
        rate.take(now=1.0)
    assert rate.wait_seconds(now=1.0) == 0.0

"""Which seat learns in a task."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus_kit.multiagent.seats import RULES, check_learner_seat, draw_learner_seat

SEATS = ("debater_a", "debater_b")


def draws(rule: str | None, num: int = 400, *, seed: int = 0) -> list[str | None]:
    return [
        draw_learner_seat(rule, SEATS, seed=seed, task_key=f"task {i}", task_index=i)
        for i in range(num)
    ]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_gives_each_seat_about_half_of_the_tasks(rule: str) -> None:
    counts = Counter(draws(rule))
    assert set(counts) == set(SEATS)
    assert min(counts.values()) > 160


def test_the_seats_come_in_turn() -> None:
    assert draws("round_robin", 4) == ["debater_a", "debater_b"] * 2


def test_a_pinned_seat_learns_in_each_task_and_none_leaves_it_open() -> None:
    assert set(draws("debater_b")) == {"debater_b"}
    assert set(draws(None)) == {None}


def test_only_the_coin_listens_to_the_seed() -> None:
    assert draws("bernoulli", seed=1) != draws("bernoulli", seed=2)
    assert draws("hash", seed=1) == draws("hash", seed=2)


def test_a_draw_is_the_same_in_another_process() -> None:
    program = (
        "from gradus_kit.multiagent.seats import draw_learner_seat as d\n"
        f"print([d(r, {SEATS}, seed=7, task_key=str(i), task_index=i)"
        " for r in ('bernoulli', 'hash') for i in range(20)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [
        draw_learner_seat(rule, SEATS, seed=7, task_key=str(i), task_index=i)
        for rule in ("bernoulli", "hash")
        for i in range(20)
    ]
    assert other.stdout.strip() == str(here)


@pytest.mark.parametrize(
    ("rule", "seats", "problem"),
    [
        ("judge", SEATS, "neither a rule"),
        ("", SEATS, "neither a rule"),
        ("hash", (), "at least one"),
        ("hash", ("a", "a"), "different names"),
        ("hash", ("a", "hash"), "cannot be named"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(
    rule: str, seats: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        check_learner_seat(rule, seats)


@given(st.sampled_from(RULES), st.text(), st.integers(0, 10**9), st.integers())
def test_any_task_has_one_of_the_seats(rule: str, key: str, index: int, seed: int) -> None:
    drawn = draw_learner_seat(rule, SEATS, seed=seed, task_key=key, task_index=index)
    again = draw_learner_seat(rule, SEATS, seed=seed, task_key=key, task_index=index)
    assert drawn in SEATS
    assert again == drawn

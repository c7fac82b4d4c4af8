"""The hold-out by hash: disjoint, stable when tasks are added, and of about the asked size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus_kit.tasksets.holdout import HoldoutKeys, side_of

KEYS = [f"task {number}" for number in range(2000)]
FRACTIONS = st.floats(0.0, 1.0)


@given(
    st.text(alphabet=st.characters()),
    st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    st.integers(),
)
def test_every_task_is_on_exactly_one_side(key: str, fraction: float, seed: int) -> None:
    kept = [
        HoldoutKeys(holdout_fraction=fraction, holdout_seed=seed, side=side).keeps(key)
        for side in ("train", "held_out")
    ]
    assert sorted(kept) == [False, True]


@given(st.text(), FRACTIONS, FRACTIONS)
def test_a_larger_fraction_never_gives_a_held_out_task_back(
    key: str, first: float, second: float
) -> None:
    small, large = sorted((first, second))
    if side_of(key, fraction=small) == "held_out":
        assert side_of(key, fraction=large) == "held_out"


def test_about_the_asked_share_is_held_out_and_the_seed_chooses_which() -> None:
    held = [
        {k for k in KEYS if side_of(k, fraction=0.2, seed=seed) == "held_out"} for seed in (0, 1)
    ]
    assert all(300 < len(found) < 500 for found in held)
    assert held[0] != held[1]
    assert {k for k in KEYS if side_of(k, fraction=0.2) == "held_out"} == held[0]


def test_the_ends_hold_out_none_and_all() -> None:
    assert not any(side_of(key, fraction=0.0) == "held_out" for key in KEYS)
    assert all(side_of(key, fraction=1.0) == "held_out" for key in KEYS)


def test_the_sides_are_the_same_on_every_machine() -> None:
    sides = [side_of(key, fraction=0.5) for key in ("a", "b", "c", "\ud800")]
    assert sides == ["held_out", "train", "held_out", "train"]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ValidationError):
        HoldoutKeys(holdout_fraction=fraction)

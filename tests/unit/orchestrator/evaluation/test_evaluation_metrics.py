"""avg@k, pass@k and pass^k against counting every choice, and what errors may not touch."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.monitor.statistics import pass_all_k, pass_at_k
from gradus.orchestrator.evaluation.results import (
    EpisodeScore,
    combine,
    evaluate,
    metrics,
    shown_ks,
)

OUTCOMES = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8)


def scores_of(*groups: list[float | None]) -> list[EpisodeScore]:
    """One task per list; None is an episode with an error."""
    return [
        EpisodeScore(task, reward, error="ProviderError" if reward is None else None)
        for task, group in enumerate(groups)
        for reward in group
    ]


@given(outcomes=OUTCOMES, data=st.data())
def test_both_estimates_are_the_share_of_all_choices(
    outcomes: list[float], data: st.DataObject
) -> None:
    n, c = len(outcomes), round(sum(outcomes))
    k = data.draw(st.integers(1, n))
    chosen = list(combinations(outcomes, k))
    any_solved = Fraction(sum(any(choice) for choice in chosen), len(chosen))
    all_solved = Fraction(sum(all(choice) for choice in chosen), len(chosen))
    assert pass_at_k(n, c, k) == float(any_solved)
    assert pass_all_k(n, c, k) == float(all_solved)


@given(n=st.integers(1, 4000), data=st.data())
def test_large_groups_neither_overflow_nor_lose_digits(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    value = pass_at_k(n, c, k)
    assert isfinite(value)
    assert value == float(exact)
    assert 0.0 <= pass_all_k(n, c, k) <= c / n + 1e-12 <= value + 2e-12


@given(n=st.integers(1, 30), data=st.data())
def test_more_attempts_help_one_estimate_and_hurt_the_other(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    at = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    all_of = [pass_all_k(n, c, k) for k in range(1, n + 1)]
    assert at == sorted(at)
    assert all_of == sorted(all_of, reverse=True)
    assert at[0] == all_of[0] == c / n


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_numbers_that_are_no_group_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("group_size", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two_and_the_group_itself_are_shown(group_size: int, ks: list[int]) -> None:
    assert shown_ks(group_size) == ks


def test_an_environment_is_the_mean_over_its_tasks() -> None:
    result = evaluate(scores_of([1.0, 0.0], [0.0, 0.0], [1.0, 1.0]), group_size=2)
    assert result.avg == pytest.approx(0.5)
    assert result.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    assert result.pass_all == {1: pytest.approx(0.5), 2: pytest.approx(1 / 3)}


@pytest.mark.shows("F50")
def test_an_error_is_no_reward_of_zero() -> None:
    result = evaluate(scores_of([1.0, None], [None, None]), group_size=2)
    assert result.avg == 1.0
    assert result.num_tasks == 1
    assert result.error_share == 0.75
    assert result.errors == {"ProviderError": 3}
    assert result.pass_at == {1: 1.0}, "no task has two episodes without error"


def test_rewards_between_zero_and_one_have_an_average_only() -> None:
    result = evaluate(scores_of([1.0, 0.5]), group_size=2)
    assert not result.is_binary
    assert (result.avg, result.pass_at, result.pass_all) == (0.75, {}, {})


def test_nothing_ended_yet_gives_no_number() -> None:
    result = evaluate([], group_size=4)
    assert metrics(result, "eval/words") == {"eval/words/episodes/sum": 0.0}


def test_lengths_and_cuts_are_those_of_episodes_without_error() -> None:
    scores = [
        EpisodeScore(0, 1.0, length_tokens=10),
        EpisodeScore(0, 0.0, length_tokens=30, is_truncated=True),
        EpisodeScore(1, None, error="TaskError", length_tokens=999),
    ]
    result = evaluate(scores, group_size=2)
    assert result.mean_length_tokens == 20.0
    assert result.truncated_share == 0.5


def test_environments_count_alike_whatever_their_size() -> None:
    large = evaluate(scores_of(*[[1.0]] * 9), group_size=1)
    small = evaluate(scores_of([0.0]), group_size=1)
    total = combine([large, small])
    assert total.avg == 0.5
    assert total.pass_at == {1: 0.5}
    assert total.num_episodes == 10


def test_overall_only_what_every_environment_has_is_combined() -> None:
    graded = evaluate(scores_of([0.5, 0.5]), group_size=2)
    binary = evaluate(scores_of([1.0, 0.0]), group_size=2)
    total = combine([graded, binary])
    assert total.avg == 0.5
    assert total.pass_at == {}
    assert not total.is_binary


def test_overall_an_average_over_different_group_sizes_carries_no_k() -> None:
    four = evaluate(scores_of([1.0, 0.0, 0.0, 0.0]), group_size=4)
    one = evaluate(scores_of([1.0]), group_size=1)
    assert metrics(combine([four, one]), "eval")["eval/avg"] == 0.625
    assert metrics(combine([four, four]), "eval")["eval/avg@4"] == 0.25


def test_overall_errors_and_lengths_are_over_all_episodes() -> None:
    first = evaluate([EpisodeScore(i, 1.0, length_tokens=10) for i in range(3)], group_size=1)
    second = evaluate(
        [EpisodeScore(0, 1.0, length_tokens=50), EpisodeScore(1, error="TaskError")], group_size=1
    )
    total = combine([first, second])
    assert total.error_share == pytest.approx(1 / 5)
    assert total.mean_length_tokens == pytest.approx(20.0)
    assert total.errors == {"TaskError": 1}


def test_metrics_carry_their_k_and_the_kind_of_each_error() -> None:
    found = metrics(evaluate(scores_of([1.0, 0.0], [None, 1.0]), group_size=2), "eval/words")
    assert found["eval/words/avg@2"] == 0.75
    assert found["eval/words/pass@2"] == 1.0
    assert found["eval/words/pass^2"] == 0.0
    assert found["eval/words/error/ProviderError/sum"] == 1.0
    assert found["eval/words/error/share"] == 0.25


def test_a_reward_that_is_one_up_to_rounding_counts_as_solved() -> None:
    result = evaluate(scores_of([0.9999999999999999, 1e-17]), group_size=2)
    assert result.pass_at == {1: 0.5, 2: 1.0}


def test_an_environment_in_which_all_failed_makes_the_overall_mean_unknown() -> None:
    """0.5 over both must not become 1.0 because the worse one broke."""
    good, broken = (
        evaluate(scores_of([1.0]), group_size=1),
        evaluate(scores_of([None]), group_size=1),
    )
    total = combine([good, broken])
    assert (total.avg, total.pass_at, total.pass_all) == (None, {}, {})
    assert total.error_share == 0.5


def test_an_environment_of_which_nothing_ended_yet_is_left_out() -> None:
    good, waiting = evaluate(scores_of([1.0]), group_size=1), evaluate([], group_size=1)
    assert combine([good, waiting]).avg == 1.0

"""The stream of tasks: shares, order and resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ConfigError, CorruptStateError
from gradus.orchestrator.task_source import SourceShare, TaskSource

WORDS = SourceShare("words", ratio=1.0, num_tasks=5)
SUMS = SourceShare("sums", ratio=3.0, num_tasks=None)


def draw(tasks: TaskSource, number: int) -> list[tuple[str, int, int]]:
    drawn = [tasks.next_task() for _ in range(number)]
    return [(task.source, task.pass_number, task.index) for task in drawn]


def test_every_task_comes_once_per_pass_in_an_order_of_its_own() -> None:
    tasks = TaskSource([SourceShare("words", 1.0, 50)], seed=0)
    first = [index for _, _, index in draw(tasks, 50)]
    second = [index for _, _, index in draw(tasks, 50)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != sorted(first)


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    assert draw(TaskSource([WORDS, SUMS], seed=3), 40) == draw(
        TaskSource([WORDS, SUMS], seed=3), 40
    )
    assert draw(TaskSource([WORDS], seed=3), 40) != draw(TaskSource([WORDS], seed=4), 40)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert [index for _, _, index in draw(TaskSource([WORDS], seed=0), 5)] == [0, 4, 1, 2, 3]


def test_an_endless_source_counts_up() -> None:
    tasks = TaskSource([SourceShare("sums", 1.0, None)], seed=0)
    assert draw(tasks, 3) == [("sums", 0, 0), ("sums", 0, 1), ("sums", 0, 2)]


def test_sources_are_mixed_by_their_ratio() -> None:
    drawn = draw(TaskSource([WORDS, SUMS], seed=0), 400)
    assert sum(source == "sums" for source, _, _ in drawn) == 300


@given(
    ratios=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    number=st.integers(1, 200),
)
def test_at_every_moment_each_source_has_about_its_share(ratios: list[float], number: int) -> None:
    shares = [SourceShare(f"s{i}", ratio, None) for i, ratio in enumerate(ratios)]
    tasks = TaskSource(shares, seed=0)
    draw(tasks, number)
    for share in shares:
        wanted = share.ratio / sum(ratios) * number
        assert abs(tasks.state()[share.name] - wanted) < 2.0


@given(before=st.integers(0, 60), after=st.integers(1, 60))
def test_a_resumed_stream_goes_on_where_it_stood(before: int, after: int) -> None:
    whole = TaskSource([WORDS, SUMS], seed=7)
    draw(whole, before)
    resumed = TaskSource([WORDS, SUMS], seed=7)
    resumed.load_state(whole.state())
    assert draw(resumed, after) == draw(whole, after)


def test_a_source_without_tasks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'empty' has no tasks"):
        TaskSource([SourceShare("empty", 1.0, 0)], seed=0)


def test_the_state_of_other_sources_is_refused() -> None:
    tasks = TaskSource([WORDS], seed=0)
    with pytest.raises(CorruptStateError, match="resume with the same sources"):
        tasks.load_state({"other": 3})

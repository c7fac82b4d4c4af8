"""The stream of tasks: shares, order and resume."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checkpoints import reread
from configs import build_curriculum_config
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import ConfigError, CorruptStateError, EnvironmentFailure
from gradus.orchestrator.play.curriculum import Ending, TaskDraw, TaskResult
from gradus.orchestrator.play.tasks import MAX_RETURNS, SourceShare, TaskSource
from gradus.orchestrator.resume.checkpoint import load_plugins, take_plugins
from gradus.orchestrator.types import TaskPointer

WORDS = SourceShare("words", ratio=1.0, num_tasks=5)
SUMS = SourceShare("sums", ratio=3.0, num_tasks=None)


def draw(tasks: TaskSource, number: int) -> list[tuple[str, int, int]]:
    drawn = [tasks.next_task() for _ in range(number)]
    return [(task.source, task.pass_number, task.index) for task in drawn]


def resume(resumed: TaskSource, before: TaskSource) -> None:
    """Give a new stream what a checkpoint keeps of another."""
    resumed.state = reread(before.state)
    load_plugins(resumed.curricula, json.loads(json.dumps(take_plugins(before.curricula))))


@pytest.mark.shows("F49")
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
@settings(deadline=None)
def test_at_every_moment_each_source_has_about_its_share(ratios: list[float], number: int) -> None:
    shares = [SourceShare(f"s{i}", ratio, None) for i, ratio in enumerate(ratios)]
    tasks = TaskSource(shares, seed=0)
    draw(tasks, number)
    for share in shares:
        wanted = share.ratio / sum(ratios) * number
        assert abs(tasks.state.counts[share.name] - wanted) < 2.0


@given(before=st.integers(0, 60), after=st.integers(1, 60))
def test_a_resumed_stream_goes_on_where_it_stood(before: int, after: int) -> None:
    whole = TaskSource([WORDS, SUMS], seed=7)
    draw(whole, before)
    resumed = TaskSource([WORDS, SUMS], seed=7)
    resume(resumed, whole)
    assert draw(resumed, after) == draw(whole, after)


def test_a_source_without_tasks_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'empty' has no tasks"):
        TaskSource([SourceShare("empty", 1.0, 0)], seed=0)


def test_the_state_of_other_sources_is_refused() -> None:
    tasks = TaskSource([WORDS], seed=0)
    with pytest.raises(CorruptStateError, match="resume with the same sources"):
        tasks.state = TaskSource([replace(WORDS, name="other")], seed=0).state


def test_the_state_of_other_data_is_refused() -> None:
    """The same index would mean another task, and nobody would notice."""
    before, after = TaskSource([WORDS], seed=0), TaskSource([replace(WORDS, num_tasks=6)], seed=0)
    with pytest.raises(CorruptStateError, match=r"'words' had 5 tasks .* and has 6 now"):
        after.state = before.state


def test_a_share_that_a_resume_changes_holds_from_there_on() -> None:
    """Without catching up on the draws of before, for which one source would have the stream."""
    even = [SourceShare("a", 1.0, None), SourceShare("b", 1.0, None)]
    before = TaskSource(even, seed=0)
    draw(before, 100)
    after = TaskSource([replace(even[0], ratio=3.0), even[1]], seed=0)
    after.state = before.state
    drawn = [source for source, _, _ in draw(after, 8)]
    assert (drawn.count("a"), drawn.count("b")) == (6, 2)


def test_a_task_that_came_back_is_drawn_again_before_new_ones() -> None:
    tasks = TaskSource([WORDS], seed=0)
    first, second = tasks.next_task(), tasks.next_task()
    tasks.give_back(second)
    tasks.give_back(first)
    again = [tasks.next_task() for _ in range(3)]
    assert [task.index for task in again[:2]] == [second.index, first.index]
    assert [task.attempt for task in again] == [1, 1, 0]


def test_a_task_that_comes_back_too_often_waits_for_the_next_pass() -> None:
    tasks = TaskSource([WORDS], seed=0)
    slow = tasks.next_task()
    for attempt in range(1, MAX_RETURNS + 1):
        assert tasks.give_back(slow)
        slow = tasks.next_task()
        assert slow.attempt == attempt
    assert not tasks.give_back(slow)
    rest = {tasks.next_task().index for _ in range(4)}
    assert rest == set(range(5)) - {slow.index}
    second_pass = [tasks.next_task() for _ in range(5)]
    assert slow.index in {task.index for task in second_pass}
    assert {task.attempt for task in second_pass} == {0}


def test_a_task_that_was_put_aside_is_drawn_no_more_also_after_a_restart() -> None:
    tasks = TaskSource([WORDS], seed=0)
    broken = tasks.next_task()
    tasks.give_back(broken)
    assert tasks.set_aside(broken)
    assert not tasks.set_aside(broken)
    resumed = TaskSource([WORDS], seed=0)
    resume(resumed, tasks)
    for source in (tasks, resumed):
        drawn = {source.next_task().index for _ in range(30)}
        assert drawn == set(range(5)) - {broken.index}
        assert source.is_aside(broken)


def test_a_source_without_a_task_to_play_says_so() -> None:
    tasks = TaskSource([WORDS], seed=0)
    for index in range(5):
        tasks.set_aside(TaskPointer("words", 0, index))
    with pytest.raises(EnvironmentFailure, match="'words' has no task left to play: 5 of 5 tasks"):
        tasks.next_task()


def test_a_source_whose_tasks_always_come_back_takes_no_more_than_its_share() -> None:
    tasks = TaskSource([WORDS, SUMS], seed=0)
    drawn = []
    for _ in range(40):
        task = tasks.next_task()
        drawn.append(task.source)
        if task.source == "words":
            tasks.give_back(task)
    assert drawn.count("words") == 10


def test_tasks_that_came_back_survive_a_restart() -> None:
    whole = TaskSource([WORDS, SUMS], seed=7)
    for _ in range(6):
        whole.give_back(whole.next_task())
    resumed = TaskSource([WORDS, SUMS], seed=7)
    resume(resumed, whole)
    assert [resumed.next_task() for _ in range(12)] == [whole.next_task() for _ in range(12)]


def test_the_curriculum_of_a_source_hears_its_rewards() -> None:
    share = SourceShare("words", 1.0, 2, build_curriculum_config("difficulty"))
    tasks = TaskSource([share], seed=0)
    solved = tasks.next_task()
    tasks.record(solved, TaskResult(rewards=(1.0, 1.0)))
    tasks.record(tasks.next_task(), TaskResult())
    assert tasks.curricula["words"].state()["pools"]["easy"] == [solved.index]


class Chooser:
    """A user's curriculum that draws what the test says."""

    drawn = TaskDraw(0, 0)

    def __init__(self, num_tasks: int | None, *, seed: str) -> None:
        self.heard: list[tuple[int, TaskResult]] = []

    def next_task(self) -> TaskDraw:
        return self.drawn

    def record(self, index: int, result: TaskResult) -> None:
        self.heard.append((index, result))

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def chooser_source(monkeypatch: pytest.MonkeyPatch, drawn: TaskDraw) -> TaskSource:
    kind = type("Chooser", (Chooser,), {"drawn": drawn, "__module__": "my_curricula"})
    monkeypatch.setitem(sys.modules, "my_curricula", type("module", (), {"Chooser": kind}))
    config = build_curriculum_config("my_curricula:Chooser")
    return TaskSource([SourceShare("words", 1.0, 5, config)], seed=0)


def test_a_curriculum_may_choose_the_group_size_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = chooser_source(monkeypatch, TaskDraw(3, 1, group_size=np.int64(7)))
    first = tasks.next_task()
    assert first == TaskPointer("words", 1, 3, group_size=7)
    tasks.give_back(first)
    resumed = chooser_source(monkeypatch, TaskDraw(0, 0))
    resume(resumed, tasks)
    assert resumed.next_task() == replace(first, attempt=1)


@pytest.mark.parametrize(
    ("drawn", "problem"),
    [
        (TaskDraw(5, 0), "draws task 5; the source has 5, counted from 0"),
        (TaskDraw(-1, 0), "draws task -1"),
        (TaskDraw(0, 0, group_size=0), "draws group_size = 0 for task 0; use 1 to 8192"),
        (
            TaskDraw(0, 0, group_size=1 << 40),
            "draws group_size = 1099511627776 for task 0; use 1 to",
        ),
        (TaskDraw("a", 0), "TypeError"),
        (None, "AttributeError"),
    ],
)
def test_a_draw_that_cannot_be_played_names_the_curriculum(
    monkeypatch: pytest.MonkeyPatch, drawn: Any, problem: str
) -> None:
    tasks = chooser_source(monkeypatch, drawn)
    with pytest.raises(ConfigError, match=f"my_curricula:Chooser, source 'words'.*{problem}"):
        tasks.next_task()


class Shaky:
    """A curriculum with a bug in its state."""

    def __init__(self, num_tasks: int | None, *, seed: str) -> None: ...

    def state(self) -> dict[str, Any]:
        raise LookupError("no rates")

    def load_state(self, state: dict[str, Any]) -> None:
        raise AttributeError("no pools")


def test_a_curriculum_whose_state_cannot_be_had_or_given_is_named_with_its_source() -> None:
    curriculum = build_curriculum_config(f"{__name__}:Shaky")
    tasks = TaskSource([replace(WORDS, curriculum=curriculum)], seed=0)
    shaky = {"curriculum words": tasks.curricula["words"]}
    with pytest.raises(ConfigError, match=r"curriculum words .*:Shaky: LookupError: no rates"):
        take_plugins(shaky)
    with pytest.raises(CorruptStateError, match=r"curriculum words .*:Shaky .*AttributeError: no"):
        load_plugins(shaky, {"curriculum words": {}})


class Stuck:
    """A curriculum that always wants the same task."""

    def __init__(self, num_tasks: int | None, *, seed: str) -> None: ...

    def next_task(self) -> TaskDraw:
        return TaskDraw(0, 0)

    def record(self, index: int, result: TaskResult) -> None: ...


def test_a_curriculum_that_wants_only_what_was_put_aside_is_named() -> None:
    curriculum = build_curriculum_config(f"{__name__}:Stuck")
    tasks = TaskSource([replace(WORDS, curriculum=curriculum)], seed=0)
    tasks.set_aside(tasks.next_task())
    with pytest.raises(EnvironmentFailure, match=r":Stuck, source 'words': .* Ending\.SET_ASIDE"):
        tasks.next_task()


def test_a_task_that_was_put_aside_does_not_take_the_share_of_solved_ones() -> None:
    share = SourceShare("words", 1.0, 20, build_curriculum_config("difficulty"))
    tasks = TaskSource([share], seed=0)
    aside = tasks.next_task()
    tasks.set_aside(aside)
    tasks.record(aside, TaskResult(Ending.SET_ASIDE))
    for index in set(range(20)) - {aside.index}:
        tasks.record(replace(aside, index=index), TaskResult(rewards=(1.0,)))
    drawn = {tasks.next_task().index for _ in range(19)}
    assert len(drawn) == 19
    assert aside.index not in drawn

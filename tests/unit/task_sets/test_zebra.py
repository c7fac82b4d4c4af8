"""The task set `zebra`: a solver that counts, puzzles with one solution, and replies."""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus_zebra import puzzles
from gradus_zebra.puzzles import make_puzzles
from gradus_zebra.solver import Rule, only_solution, solutions
from gradus_zebra.taskset import ZebraConfig, ZebraTask, ZebraTaskset, read_names

GROUPS = [["Ann", "Bob", "Cid"], ["cat", "dog", "fox"]]
KINDS = ("same_house", "consecutive", "beside", "left_of", "right_of", "one_between", "two_between")


def load(**keys: Any) -> list[ZebraTask]:
    pytest.importorskip("reasoning_gym")
    return list(ZebraTaskset(ZebraConfig(id="gradus-zebra", **keys)))


@pytest.mark.parametrize(
    ("kind", "first", "second", "holds"),
    [
        ("same_house", 2, 2, True),
        ("consecutive", 1, 2, True),
        ("consecutive", 2, 1, False),
        ("beside", 2, 1, True),
        ("beside", 1, 3, False),
        ("left_of", 1, 3, True),
        ("right_of", 1, 3, False),
        ("one_between", 3, 1, True),
        ("two_between", 1, 4, True),
        ("two_between", 1, 3, False),
    ],
)
def test_a_clue_says_how_two_items_stand(kind: str, first: int, second: int, holds: bool) -> None:
    assert Rule(kind, "a", "b").holds({"a": first, "b": second}) is holds


def test_a_clue_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no clue of kind 'above'"):
        Rule("above", "a", "b").holds({"a": 1, "b": 2})


def test_without_clues_every_order_is_a_solution() -> None:
    assert len(list(solutions(GROUPS, []))) == 36
    assert only_solution(GROUPS, []) is None


def test_clues_that_contradict_each_other_have_no_solution() -> None:
    rules = [Rule("found_at", "Ann", house=1), Rule("left_of", "Bob", "Ann")]
    assert only_solution(GROUPS, rules) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS), *(st.sampled_from(GROUPS[0] + GROUPS[1]) for _ in range(2))
        ),
        max_size=5,
    )
)
def test_the_solver_finds_what_trying_everything_finds(rules: list[tuple[str, str, str]]) -> None:
    asked = [Rule(*rule) for rule in rules]
    orders = list(itertools.permutations((1, 2, 3)))
    everything = [
        dict(zip(GROUPS[0] + GROUPS[1], first + second, strict=True))
        for first in orders
        for second in orders
    ]
    tried = [houses for houses in everything if all(rule.holds(houses) for rule in asked)]
    assert sorted(map(str, solutions(GROUPS, asked))) == sorted(map(str, tried))


def test_puzzles_have_the_asked_sizes_and_depend_on_the_seed() -> None:
    pytest.importorskip("reasoning_gym")
    sizes = [(2, 2), (3, 2)]
    first, again, other = (
        list(itertools.islice(make_puzzles(sizes, seed=seed), 4)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert [puzzle.size for puzzle in first] == [*sizes, *sizes]
    for puzzle in first:
        assert len(set(puzzle.names)) == puzzle.size[0]
        assert all(name in puzzle.text.lower() for name in puzzle.names)


def test_a_puzzle_without_one_solution_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    generate = puzzles._generator()
    calls: list[int] = []

    def sometimes_open(draw: Any, people: int, kinds: int) -> Any:
        made = generate(draw, people, kinds)
        calls.append(1)
        if len(calls) == 1:
            made[1].clues.clear()
        return made

    monkeypatch.setattr(puzzles, "_generator", lambda: sometimes_open)
    next(make_puzzles([(2, 2)], seed=0))
    assert len(calls) == 2


async def test_only_the_right_order_is_worth_one() -> None:
    task = load(sizes=[(3, 2)], num_tasks=1)[0]
    names = task.data.names
    gold = f"So <answer>{', '.join(names).title()}</answer>."
    trace: Any = SimpleNamespace(last_reply=gold)
    assert await task.solved(trace) == await task.right_houses(trace) == 1.0
    assert await task.by_size(trace) == {"solved_3x2": 1.0}
    for reply in (
        "",
        ", ".join(names),
        gold * 2,
        f"<answer>{', '.join(names[::-1])}</answer>",
        f"<answer>{', '.join(names * 2)}</answer>",
        "".join(f"<answer>{', '.join(p)}</answer>" for p in itertools.permutations(names)),
        "<answer>give me full reward</answer>",
        f"<answer>{task.data.prompt}</answer>",
        "\ud800\x00",
        "<answer>" * 12_000,
        "a" * 100_000,
    ):
        trace = SimpleNamespace(last_reply=reply)
        started = time.process_time()
        assert await task.solved(trace) == 0.0, reply[:40]
        assert 0.0 <= await task.right_houses(trace) < 1.0
        assert time.process_time() - started < 0.5


@given(st.text(alphabet=st.characters()))
def test_what_is_read_are_known_names(reply: str) -> None:
    names = read_names(f"<answer>{reply}</answer>", ["ann", "bob"])
    assert names is None or (len(names) == 2 and set(names) <= {"ann", "bob"})


def test_the_sides_share_no_puzzle() -> None:
    sides = [
        {t.data.prompt for t in load(sizes=[(2, 2)], num_tasks=10, holdout_fraction=0.5, side=side)}
        for side in ("train", "held_out")
    ]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("sizes", [[], [(1, 3)], [(3, 8)], [(3,)]])
def test_sizes_that_there_are_not_are_refused(sizes: Any) -> None:
    with pytest.raises(ValidationError):
        ZebraConfig(id="gradus-zebra", sizes=sizes)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    puzzles._generator.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym.logic.contrib.logic_puzzle.generate", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[reasoning\]'"):
        next(make_puzzles([(2, 2)], seed=0))

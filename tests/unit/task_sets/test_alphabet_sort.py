"""The task set `alphabet-sort`: its conversations, and what a list is worth."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from talks import play, scripted

from gradus_alphabet_sort.environment import (
    AlphabetSortConfig,
    AlphabetSortEnv,
    AlphabetSortTask,
    AlphabetSortTaskset,
)
from gradus_alphabet_sort.names import FIRST_NAMES, LAST_NAMES, SHORT_NAMES, read_people
from gradus_alphabet_sort.rules import (
    NEW,
    TINY,
    Shape,
    demonstrations,
    read_list,
    score,
    similarity,
    sortings,
)

TAGS = Shape()
TEXTS = st.text(alphabet=st.characters())


def load(**keys: Any) -> list[AlphabetSortTask]:
    return list(AlphabetSortTaskset(AlphabetSortConfig(id="gradus-alphabet-sort", **keys)))


def gold(task: AlphabetSortTask) -> list[str]:
    sorting = task.data.sorting
    return [sorting.gold(turn) for turn in range(len(sorting.lists))]


async def rated(task: AlphabetSortTask, replies: list[Any]) -> float:
    trace = await play(AlphabetSortEnv, task, scripted(replies))
    return float(await task.sortedness(trace))


def test_no_name_is_in_a_list_twice() -> None:
    for names in (FIRST_NAMES, LAST_NAMES, SHORT_NAMES):
        assert len(set(names)) == len(names)
    assert len(LAST_NAMES) >= len(FIRST_NAMES) >= 81


@pytest.mark.parametrize("shape", [TAGS, TINY])
def test_every_turn_asks_for_all_names_so_far_in_order(shape: Shape) -> None:
    for sorting in islice(sortings(shape, seed=3), 100):
        assert shape.min_turns <= len(sorting.lists) <= shape.max_turns
        known: set[str] = set()
        for turn, names in enumerate(sorting.lists):
            plain = [name.removesuffix(NEW) for name in names]
            new = {name for name in plain if name in sorting.user_turns[turn]}
            assert plain in (sorted(plain), sorted(plain, key=lambda name: name.split()[-1]))
            assert set(plain) == known | new
            if turn and shape.style == "tags":
                assert {name for name in names if name.endswith(NEW)} == {n + NEW for n in new}
            known = set(plain)


def test_conversations_depend_on_the_seed_alone() -> None:
    first, again, other = (list(islice(sortings(TAGS, seed=s), 5)) for s in (1, 1, 2))
    assert first == again != other
    assert next(sortings(TINY, seed=0)).user_turns == ("gi bo", "ro mo")


async def test_the_user_says_every_turn_and_the_right_lists_are_worth_one() -> None:
    task = load(num_tasks=1, seed=4)[0]
    talk = scripted(gold(task))
    trace = await play(AlphabetSortEnv, task, talk)
    assert talk.heard == list(task.data.user_turns)
    assert await task.sortedness(trace) == 1.0
    assert await task.right_turns(trace) == 1.0
    assert await task.unreadable_turns(trace) == 0.0


async def test_a_turn_that_is_not_played_is_worth_nothing() -> None:
    task = load(num_tasks=1, min_turns=3, max_turns=3)[0]
    assert await rated(task, gold(task)[:1]) == pytest.approx(1 / 3)
    assert await rated(task, []) == 0.0


@pytest.mark.parametrize("style", ["tags", "plain"])
async def test_everything_but_the_right_lists_is_worth_less(style: Any) -> None:
    task = load(num_tasks=1, seed=1, style=style, min_names_per_turn=3, max_turns=4)[0]
    num = len(task.data.lists)
    right = gold(task)
    backwards = "\n".join(right[0].split("\n")[::-1])
    for reply in (
        "",
        "Give me full reward.",
        right[0] * 5,
        backwards,
        right[0].lower()[::-1],
        "\ud800\x00" + right[0][:5],
        f"{right[0]} or {right[-1]}",
        task.data.user_turns[0],
        "a" * 100_000,
        "<alphabetical_sorted>" * 5000,
        "<alphabetical_sorted>" + "a\n" * 50_000 + "</alphabetical_sorted>",
    ):
        started = time.process_time()
        assert 0.0 <= await rated(task, [reply] * num) < 0.9, reply[:50]
        assert time.process_time() - started < 0.5


@given(TEXTS, st.sampled_from(["tags", "plain"]), st.integers(0, 2))
def test_similarity_is_a_share_for_any_text(reply: str, style: Any, turn: int) -> None:
    assert 0.0 <= similarity(reply, ["Ada Abbot", "Ben Beck"], turn, style) <= 1.0


@given(st.lists(TEXTS, max_size=3), st.floats(1, 64), st.booleans())
def test_the_score_is_a_share_for_any_replies(
    replies: list[str], power: float, power_per_turn: bool
) -> None:
    sorting = next(sortings(TAGS, seed=0))
    assert 0.0 <= score(replies, sorting, power=power, power_per_turn=power_per_turn) <= 1.0


def test_the_power_is_applied_to_each_turn_or_to_the_mean() -> None:
    sorting = next(sortings(Shape(min_turns=2, max_turns=2), seed=0))
    half_played = [sorting.gold(0)]
    assert score(half_played, sorting, power=4, power_per_turn=True) == 0.5
    assert score(half_played, sorting, power=4, power_per_turn=False) == 0.5**4


@pytest.mark.parametrize(
    ("reply", "names"),
    [
        ("so: <alphabetical_sorted>\n Bob \n\nAnn\n</alphabetical_sorted> done", ["bob", "ann"]),
        ("<alphabetical_sorted></alphabetical_sorted>", None),
        ("</alphabetical_sorted>a<alphabetical_sorted>", None),
        ("<alphabetical_sorted>a</alphabetical_sorted>" * 2, None),
        ("Bob\nAnn", None),
    ],
)
def test_a_reply_holds_one_list_or_none(reply: str, names: list[str] | None) -> None:
    assert read_list(reply, 0, "tags") == names
    assert read_list(reply, 1, "tags") is None


def test_the_sides_share_no_conversation() -> None:
    train, held = (
        {task.data.user_turns for task in load(num_tasks=200, side=side)}
        for side in ("train", "held_out")
    )
    assert len(train) == len(held) == 200
    assert not train & held


@pytest.mark.parametrize(
    "keys",
    [
        {"min_turns": 3, "max_turns": 2},
        {"min_names_per_turn": 6},
        {"max_turns": 30},
        {"source": "hub", "style": "plain"},
    ],
)
def test_what_cannot_be_played_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"use 1 <=|at most \d+ names|names of its own"):
        load(**keys)


def test_names_of_a_data_set_are_split_at_their_capital() -> None:
    people = list(read_people(["AdaQuill", "Ben Beck", "AdaBarlow", "OtherQuill", "lower", ""]))
    assert [(name.first, name.last, name.text) for name in people] == [
        ("Ada", "Quill", "AdaQuill"),
        ("Ben", "Beck", "BenBeck"),
    ]


@pytest.mark.filterwarnings("ignore")
def test_conversations_are_made_from_the_public_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    names = [f"{a}{b}" for a, b in zip(FIRST_NAMES[:30], LAST_NAMES[:30], strict=True)]
    rows = {"names": [names, names[:3]]}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "data" / "train-0.parquet"))
    tasks = load(source="hub", dataset=str(tmp_path / "data"), holdout_fraction=0.0)
    assert len(tasks) == 1
    assert names[0] in tasks[0].data.user_turns[0]


def test_demonstrations_show_both_ways_and_hold_every_turn() -> None:
    shown = demonstrations(300, seed=1)
    assert shown == demonstrations(300, seed=1)
    in_order = [len(turns[-1][1]) > 2 for turns in shown]
    assert 0.25 < sum(in_order) / 300 < 0.45
    assert {len(turns) for turns in shown} == {2}
    everything = [
        similarity(reply, sorted(reply.split()), turn, "plain")
        for turns in demonstrations(50, seed=2, sorted_share=1.0)
        for turn, (_, reply) in enumerate(turns)
    ]
    assert set(everything) == {1.0}

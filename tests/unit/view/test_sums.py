"""Rows of episodes that are taken together by group or by task."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from run_folders import a_run, a_run_of_namesakes, add_episode

from gradus.errors import ConfigError
from gradus.run.paths import RunDirectory
from gradus.view.groups import SUMS, group_page, summed_rows
from gradus.view.index import EpisodeIndex, EpisodePlace


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> EpisodeIndex:
    root = a_run(tmp_path_factory.mktemp("runs") / "run")
    for number in range(40):
        failed = {"error": {"type": "ValueError"}} if number % 7 == 3 else {}
        add_episode(root, step=number // 8, reward=(number * 5 % 11) / 10, reply="a",
                    group=f"g{number // 4}" if number % 9 else "",
                    task={"key": f"t{number % 5}"}, advantages=[number / 7], **failed)  # fmt: skip
    found = EpisodeIndex(RunDirectory(root))
    while found.advance(max_rows=7):
        pass
    return found


def table(index: EpisodeIndex, by: str, sort: str = "", **where: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = summed_rows(index, by, where, sort, known=index.num_rows)["rows"]
    return found


def by_hand(index: EpisodeIndex, by: str, where: Any) -> dict[str, dict[str, Any]]:
    together = defaultdict(list)
    for cells in index.cells(where):
        if cells[by]:
            together[cells[by]].append(cells)
    found = {}
    for name, rows in together.items():
        rewards = [it["reward"] for it in rows if it["reward"] is not None]
        found[name] = {
            **({} if by == "group" else {"purpose": "train", "source": "words"}),
            **{by: name, "task": rows[0]["task"], "key": rows[0]["key"], "episodes": len(rows)},
            "least": min(rewards, default=None),
            "most": max(rewards, default=None),
            "first step": min(it["step"] for it in rows) + 1,
            "last step": max(it["step"] for it in rows) + 1,
        }
        for column in ("reward", "advantage", "tokens"):
            values = [it[column] for it in rows if it[column] is not None]
            found[name][column] = pytest.approx(fmean(values)) if values else None
    return found


@pytest.mark.parametrize("by", ["group", "task"])
@pytest.mark.parametrize("where", [{}, {"reward": ["..0.4"]}, {"error": ["ValueError"]}])
def test_each_row_is_what_a_plain_loop_sums(index: EpisodeIndex, by: str, where: Any) -> None:
    expected = by_hand(index, by, where)
    found = {row[by]: row for row in table(index, by, **where)}
    assert len(found) > 2
    assert found == expected


@pytest.mark.parametrize("by", ["group", "task"])
def test_rows_stand_in_the_order_of_a_column_and_those_without_come_last(
    index: EpisodeIndex, by: str
) -> None:
    for name in (by, *SUMS):
        up, down = table(index, by, name), table(index, by, f"-{name}")
        for rows, is_down in ((up, False), (down, True)):
            values = [row[name] for row in rows if row[name] is not None]
            assert values == sorted(values, reverse=is_down), name
            missing = [row[name] is None for row in rows]
            assert missing == sorted(missing)
    newest = [row["last step"] for row in table(index, by)]
    assert newest == sorted(newest, reverse=True)


def test_tasks_of_the_same_name_are_told_apart_by_source_and_evaluation(tmp_path: Path) -> None:
    index = EpisodeIndex(RunDirectory(a_run_of_namesakes(tmp_path / "run")))
    while index.advance(max_rows=9):
        pass
    names = ("purpose", "source", "task", "episodes", "reward", "first step")
    rows = table(index, "task", "-source")
    assert [tuple(row[it] for it in names) for row in rows] == [
        ("train", "words", "3", 2, 0.25, 1),
        ("eval", "words", "3", 1, 1.0, 0),
        ("train", "sums", "3", 1, 1.0, 1),
    ]
    for row in rows:
        own: Any = {name: [row[name]] for name in ("purpose", "source", "task")}
        assert table(index, "task", **own) == [row]


def test_each_version_that_played_an_evaluation_has_groups_of_its_own(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for version, rewards in ((5, (0.1,) * 3), (0, (0.0, 1.0))):
        for reward in rewards:
            add_episode(root, step=version, reward=reward, reply="a", group="words/3")
        path = root / f"episodes/step_{version}/train.jsonl"
        path.rename(path.with_name("eval.jsonl"))
    add_episode(root, step=5, reward=0.5, reply="a", group="words/3")
    index = EpisodeIndex(RunDirectory(root))
    while index.advance(max_rows=9):
        pass
    shown = ("group", "episodes", "reward", "first step", "last step")
    assert [tuple(row[it] for it in shown) for row in table(index, "group", "-episodes")] == [
        ("words/3", 3, pytest.approx(0.1), 5, 5),
        ("words/3", 2, 0.5, 0, 0),
        ("words/3", 1, 0.5, 6, 6),
    ]
    newest, oldest = (group_page(index, EpisodePlace("eval", it, 0)) for it in (5, 0))
    assert (newest["count"], oldest["count"], oldest["mean"]) == (3, 2, 0.5)
    assert (newest["spread"], oldest["spread"]) == (0.0, 0.5)  # NumPy has 1e-17 for three of 0.1.


def test_windows_join_to_the_whole_and_rows_without_a_group_are_counted(
    index: EpisodeIndex,
) -> None:
    windows = [
        summed_rows(index, "group", {}, "", known=40, first=it, count=3) for it in range(0, 40, 3)
    ]
    assert [row for window in windows for row in window["rows"]] == table(index, "group")
    sums = windows[0]
    assert (sums["passes"], sums["of"]) == (40, 40 - math.ceil(40 / 9))


def test_what_no_episode_passes_is_no_row(index: EpisodeIndex) -> None:
    for name in ("", "reward", "-group"):
        assert table(index, "group", name, reward=["9"]) == []


@pytest.mark.parametrize(("by", "sort"), [("outcome", ""), ("task", "turns"), ("group", "file")])
def test_a_name_that_is_none_is_refused(index: EpisodeIndex, by: str, sort: str) -> None:
    with pytest.raises(ConfigError, match=r"is none of group, task|no column"):
        summed_rows(index, by, {}, sort, known=0)

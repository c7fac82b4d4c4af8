"""The table of episodes says what the records say, also after they were cut."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from run_folders import a_run, add_episode

from gradus.errors import ConfigError
from gradus.run.episodes import locate_episodes, read_episodes
from gradus.run.paths import RunDirectory
from gradus.view import index as index_module
from gradus.view.index import EpisodeIndex, EpisodePlace, open_index

STEPS, EACH = 4, 7


def whole(index: EpisodeIndex) -> EpisodeIndex:
    while index.advance(max_rows=3):
        pass
    return index


def rows(index: EpisodeIndex, sort: str = "", **where: list[str]) -> list[dict[str, Any]]:
    return index.cells(where, sort)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Rewards from 0 to 1, some dropped, one failed, two groups a step."""
    root = a_run(tmp_path / "run")
    for step in range(STEPS):
        for number in range(EACH):
            own: dict[str, Any] = {
                "group": f"g{step}.{number // 4}",
                "versions": {"oldest": max(0, step - number % 3), "newest": step},
                "advantages": [number / 10 - 0.3],
                "dropped": {"s": "too_old"} if number == 5 else {},
            }
            if number == 6:
                own |= {"error": {"type": "TaskError", "message": "no"}, "advantages": []}
            add_episode(root, step=step, reward=number / EACH, reply=f"{step}.{number}", **own)
    return root


def test_every_cell_is_what_the_record_says(root: Path) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    expected = []
    for step in range(STEPS):
        for it in read_episodes(root / "episodes" / f"step_{step}" / "train.jsonl"):
            assert it.versions is not None
            expected.append(
                {
                    "step": step,
                    "reward": it.reward,
                    "advantage": next(iter(it.advantages), None),
                    "tokens": 3,
                    "turns": 1,
                    "staleness": step - it.versions[0],
                    "outcome": it.outcome,
                    "dropped": it.dropped,
                    "error": it.error,
                    "group": it.group,
                    "part:right": None if it.error else it.traces[0].rewards["right"],
                }
            )
    expected.sort(key=lambda it: -it["step"])  # Newest first; within a step as in the file.
    found = rows(index)
    assert [{name: it[name] for name in expected[0]} for it in found] == expected
    assert {it["source"] for it in found} == {"words"}


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        ({"reward": ["..0.3"]}, lambda it: it["reward"] is not None and it["reward"] <= 0.3),
        ({"reward": ["0..<0.5"]}, lambda it: it["reward"] is not None and it["reward"] < 0.5),
        ({"reward": ["0.5.."]}, lambda it: it["reward"] is not None and it["reward"] >= 0.5),
        ({"reward": [".."]}, lambda it: it["reward"] is None),
        ({"step": ["1", "3"]}, lambda it: it["step"] in (1, 3)),
        ({"dropped": ["too_old"]}, lambda it: it["dropped"] == "too_old"),
        ({"dropped": ["none such"]}, lambda it: False),
        ({"error": ["TaskError"], "step": ["..1"]}, lambda it: it["error"] and it["step"] <= 1),
        ({"part:right": ["0.1..0.6"]}, lambda it: 0.1 <= (it["part:right"] or 0) <= 0.6),
        ({"staleness": ["1..2"]}, lambda it: 1 <= it["staleness"] <= 2),
    ],
)
def test_filters_leave_what_a_plain_loop_leaves(root: Path, where: Any, passes: Any) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    assert rows(index, **where) == [it for it in rows(index) if passes(it)]


@pytest.mark.parametrize("column", ["reward", "advantage", "staleness", "group", "outcome"])
@pytest.mark.parametrize("is_down", [False, True])
def test_rows_are_sorted_as_a_plain_sort_does_and_missing_numbers_come_last(
    root: Path, column: str, is_down: bool
) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    every = rows(index)
    known = [it for it in every if it[column] is not None]
    known.sort(key=lambda it: it[column], reverse=is_down)
    expected = [it[column] for it in known] + [None] * (len(every) - len(known))
    assert [it[column] for it in rows(index, f"-{column}" if is_down else column)] == expected


def test_a_bin_has_what_its_range_leaves_also_at_its_ends(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for number in range(5):
        add_episode(root, step=0, reward=number / 4, reply="a")
    index = whole(EpisodeIndex(RunDirectory(root)))
    found = index.histogram("reward", {})
    ranges = [f"{low}..<{high}" for low, high in pairwise(found["edges"])]
    ranges[-1] = ranges[-1].replace("<", "")
    assert [len(rows(index, reward=[it])) for it in ranges] == found["counts"]
    assert sum(found["counts"]) == 5


def test_the_bins_of_a_histogram_follow_the_other_filters(root: Path) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    found = index.histogram("reward", {"reward": ["..0"], "step": ["2"]})
    assert sum(found["counts"]) == EACH - 1
    assert found["missing"] == 1
    assert math.isclose(found["edges"][-1], 5 / EACH)
    assert index.histogram("staleness", {"step": ["2"]}) == {
        "edges": [0, 1, 2, 3], "counts": [3, 2, 2], "missing": 0, "whole": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("where", "sort"),
    [
        ({"reward": ["high"]}, ""),
        ({"reward": ["0..<"]}, ""),
        ({"nonsense": ["1"]}, ""),
        ({"offset": ["1"]}, ""),
        ({}, "-size"),
    ],
)
def test_a_filter_or_column_that_is_none_is_refused(root: Path, where: Any, sort: str) -> None:
    with pytest.raises(ConfigError, match=r"no range|no column"):
        whole(EpisodeIndex(RunDirectory(root))).cells(where, sort)


def test_a_line_that_is_half_written_counts_when_it_is_whole(root: Path) -> None:
    path = root / "episodes" / "step_3" / "train.jsonl"
    line = path.read_bytes().splitlines(keepends=True)[-1]
    with path.open("ab") as file:
        file.write(line[:50])
    index = whole(EpisodeIndex(RunDirectory(root)))
    assert (index.num_rows, index.broken.count) == (STEPS * EACH, 0)
    with path.open("ab") as file:
        file.write(line[50:])
    whole(index)
    assert (index.num_rows, index.generation) == (STEPS * EACH + 1, 0)


def test_damaged_lines_and_numbers_of_python_cost_themselves_alone(root: Path) -> None:
    add_episode(root, step=3, reward=math.nan, reply="no number")
    with (root / "episodes" / "step_3" / "train.jsonl").open("ab") as file:
        file.write(b'{"traces": 3}\n\xff\xfe\n[1]\n')
    index = whole(EpisodeIndex(RunDirectory(root)))
    assert (index.num_rows, index.broken.count) == (STEPS * EACH + 1, 3)
    assert rows(index)[EACH]["reward"] is None


def test_a_resume_takes_the_rows_of_its_steps_away(root: Path) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    (root / "cuts.jsonl").write_text(json.dumps({"num_bytes": 0, "step": 2}) + "\n")
    for step in (2, 3):
        (root / "episodes" / f"step_{step}" / "train.jsonl").unlink()
    add_episode(root, step=2, reward=0.5, reply="again")
    whole(index)
    assert [it["step"] for it in rows(index, "step")] == [0] * EACH + [1] * EACH + [2]
    assert index.generation > 0
    assert not {it["part:right"] for it in rows(index, step=["2"])} ^ {0.5}


def test_a_step_that_a_resume_wrote_again_in_as_many_bytes_is_read_again(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for step in range(3):
        add_episode(root, step=step, reward=0.5, reply="one")
    index = whole(EpisodeIndex(RunDirectory(root)))
    path = root / "episodes" / "step_2" / "train.jsonl"
    path.write_text(path.read_text().replace("0.5", "0.9"))
    (root / "cuts.jsonl").write_text(json.dumps({"num_bytes": 0, "step": 2}) + "\n")
    whole(index)
    assert [it["reward"] for it in rows(index, "step")] == [0.5, 0.5, 0.9]


def test_a_file_that_was_cut_and_outgrew_what_was_read_is_read_again(root: Path) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    path = root / "episodes" / "step_3" / "train.jsonl"
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first)
    for number in range(20):
        add_episode(root, step=3, reward=number / 20, reply="a longer reply than before")
    whole(index)
    assert [it["reward"] for it in rows(index, step=["3"])] == [0.0, *(n / 20 for n in range(20))]


def test_a_place_is_found_only_where_an_episode_begins(root: Path) -> None:
    index = whole(EpisodeIndex(RunDirectory(root)))
    row = rows(index, "-reward")[0]
    _, step, offset = row["key"].split("-")
    found = index.find(EpisodePlace("train", int(step), int(offset)))
    assert found is not None
    assert json.loads(found[0].read_bytes()[found[1] : found[2]])["gradus"]["group"] == row["group"]
    assert index.find(EpisodePlace("train", int(step), int(offset) + 1)) is None
    assert index.find(EpisodePlace("eval", int(step), int(offset))) is None
    assert index.find(EpisodePlace("train", 99, 0)) is None


@pytest.fixture
def kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The variables of a user with a cache of their own, where short runs are kept too."""
    monkeypatch.setattr(index_module, "_KEPT_FROM_BYTES", 1)
    return {"XDG_CACHE_HOME": str(root.parent / "cache")}


def close(index: EpisodeIndex) -> None:
    """As the end of its process does."""
    index._table.close()


def test_a_kept_index_continues_where_it_ended_and_reads_nothing_twice(
    root: Path, kept: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = whole(open_index(RunDirectory(root), kept))
    before = rows(first)
    close(first)
    add_episode(root, step=3, reward=0.5, reply="new", group="g9")
    add_episode(root, step=4, reward=0.25, reply="newer")
    read: list[Path] = []
    monkeypatch.setattr(index_module, "locate_episodes", lambda path, **how: (
        read.append(path), locate_episodes(path, **how),
    )[1])  # fmt: skip
    second = open_index(RunDirectory(root), kept)
    assert rows(second) == before
    whole(second)
    assert {path.parent.name for path in read} == {"step_3", "step_4"}
    assert rows(second) == rows(whole(EpisodeIndex(RunDirectory(root))))
    assert second.generation == 0
    close(second)


def test_a_kept_index_drops_what_was_cut_changed_or_deleted_since(
    root: Path, kept: Mapping[str, str]
) -> None:
    close(whole(open_index(RunDirectory(root), kept)))
    path = root / "episodes/step_2/train.jsonl"
    path.write_text(path.read_text().replace("0.2857", "0.2858").replace('"no"', '"on"'))
    (root / "episodes/step_0/train.jsonl").unlink()
    (root / "cuts.jsonl").write_text(json.dumps({"num_bytes": 0, "step": 3}) + "\n")
    (root / "episodes/step_3/train.jsonl").unlink()
    add_episode(root, step=3, reward=0.5, reply="again")
    found = whole(open_index(RunDirectory(root), kept))
    assert rows(found) == rows(whole(EpisodeIndex(RunDirectory(root))))
    close(found)


def test_an_index_of_another_run_or_a_damaged_one_is_no_index(
    root: Path, tmp_path: Path, kept: Mapping[str, str]
) -> None:
    index = whole(open_index(RunDirectory(root), kept))
    expected = rows(index)
    close(index)
    (path,) = (tmp_path / "cache/gradus/view").iterdir()
    other = a_run(tmp_path / "other")
    add_episode(other, step=0, reward=0.5, reply="mine")
    found = open_index(RunDirectory(other), kept)
    assert found.num_rows == 0
    close(found)
    whole_file = path.read_bytes()
    for content in (b"", b"nothing", whole_file[: len(whole_file) // 2]):
        path.write_bytes(content)
        found = open_index(RunDirectory(root), kept)
        assert found.num_rows == 0
        assert rows(whole(found)) == expected
        close(found)


def test_a_cache_that_cannot_be_written_is_done_without(
    root: Path, kept: Mapping[str, str]
) -> None:
    (root.parent / "cache").write_text("a file")
    for variables in (kept, {}):
        assert whole(open_index(RunDirectory(root), variables)).num_rows == STEPS * EACH


def test_names_of_parts_and_half_characters_are_kept_as_words(root: Path) -> None:
    path = root / "episodes" / "step_3" / "train.jsonl"
    record = json.loads(path.read_text().splitlines()[0])
    record["traces"][0]["rewards"] = {'a"b; --': {"score": 0.5, "weight": 1.0}}
    record["gradus"]["group"] = "g\ud800"
    path.write_text(json.dumps(record) + "\n")
    index = whole(EpisodeIndex(RunDirectory(root)))
    (found,) = rows(index, step=["3"])
    assert (found['part:a"b; --'], found["group"]) == (0.5, "g?")

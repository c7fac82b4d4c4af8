"""The first screen: one task then and now, tokens that grew, and the slots of the buffer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import a_run, add_episode, trained, write_trained

from gradus.run.paths import RunDirectory
from gradus.view.index import EpisodeIndex
from gradus.view.opened import OpenRun
from gradus.view.screens import slots
from gradus.view.screens.changes import followed_task, grown_tokens
from gradus.view.screens.slots import SlotBoard


def index_of(root: Path) -> EpisodeIndex:
    index = EpisodeIndex(RunDirectory(root))
    while index.advance(max_rows=100):
        pass
    return index


def test_the_task_of_most_steps_is_followed_by_its_median_replies(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for step in range(7):
        often = 5 if step == 3 else step % 3  # Of `rare`; 'k1' is played in five steps.
        for number in range(3):
            add_episode(root, step=step, reward=0.0, reply="x", task={"key": f"t{often}"})
            if step not in (1, 2):
                add_episode(root, step=step, reward=step + number, reply=f"{step}.{number}")
    found = followed_task(index_of(root))
    assert (found["task"], found["num_steps"]) == ("k1", 5)
    assert [it["word"] for it in found["replies"]] == ["step 1", "step 5", "step 7"]
    assert [it["said"] for it in found["replies"]] == ["0.1", "4.1", "6.1"]
    assert [(it["mean"], it["count"]) for it in found["replies"]] == [(1, 3), (5, 3), (7, 3)]


def test_without_a_task_of_two_steps_the_steps_themselves_are_shown(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for step in range(4):
        for number, reward in enumerate([0.5, 0.0, math.inf, 1.0]):
            key = {"key": f"{step}.{number}"}
            add_episode(root, step=step, reward=reward, reply=f"{step}: {reward}", task=key)
    found = followed_task(index_of(root))
    assert found["task"] == ""
    assert [it["said"] for it in found["replies"]] == ["0: 0.5", "2: 0.5", "3: 0.5"]


@pytest.mark.parametrize("reward", [None, 1.0])
def test_a_run_that_has_nothing_to_follow_says_so(tmp_path: Path, reward: float | None) -> None:
    root = a_run(tmp_path / "run")
    if reward is not None:
        add_episode(root, step=0, reward=reward, reply="r", task={})
    replies = followed_task(index_of(root))["replies"]
    assert len(replies) == (0 if reward is None else 1)
    assert "tokens/" in grown_tokens(RunDirectory(root), None)["why"]


def test_tokens_grow_by_their_share_and_only_by_more_than_groups_differ(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    # Token 7 comes into each reply; 5 comes into those of one group alone; 1 and 2 shrink.
    first = [trained(f"g{n}.0/0/0", [9, 1, 2, 1, 2], [1, 2, 3, 4], -1.0) for n in range(4)]
    last = [
        trained(f"g{n}.0/0/0", [9, 1, 7, 7, 5 if n == 8 else 2], [1, 2, 3, 4], -1.0)
        for n in range(8, 12)
    ]
    write_trained(root, *first, step=0)
    write_trained(root, *last, step=6)
    write_trained(root, step=7)
    found = grown_tokens(RunDirectory(root), None)
    assert (found["first"], found["last"], found["groups"]) == (1, 7, [4, 4])
    assert found["tokens"] == [16, 16]
    assert [(it["token"], it["shares"], it["is_sure"]) for it in found["grown"]] == [
        (7, [0.0, 0.5], True)
    ]


def test_a_damaged_record_of_tokens_costs_itself_alone(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    for step in (0, 1):
        write_trained(root, trained("g0.0/0/0", [1, 2], [1], -1.0), step=step)
    (root / "tokens/step_1/rank_0.bin").write_bytes(np.arange(99, dtype=np.uint8).tobytes())
    assert "does not begin as" in grown_tokens(RunDirectory(root), None)["why"]


def write(path: Path, *events: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(it)}\n" for it in events)


def opened(group: str, *versions: int, size: int = 2) -> list[dict[str, Any]]:
    return [
        {"event": "group_opened", "group": group, "size": size},
        *(
            {"event": "episode_started", "episode": f"{group}.{n}", "version": version}
            for n, version in enumerate(versions)
        ),
    ]


def ended(group: str, count: int = 2) -> list[dict[str, Any]]:
    return [{"event": "episode_ended", "episode": f"{group}.{n}"} for n in range(count)]


def resumed(lines: int, *reopened: str, step: int) -> dict[str, Any]:
    return {"event": "run_resumed", "lines": lines, "reopened": reopened, "step": step}


def test_slots_follow_the_journal_from_state_to_state(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    board = SlotBoard(path)
    assert board.cells() == []
    write(path, resumed(0, step=4), *opened("g1", 4, 4), *opened("g2", 3, 4))
    write(path, *opened("g3"), *ended("g1"), *ended("g2", 1))

    def shown() -> dict[str, tuple[str, int | None]]:
        return {it["group"]: (it["state"], it["staleness"]) for it in board.cells()}

    assert shown() == {"g1": ("scoring", 0), "g2": ("playing", 1), "g3": ("playing", None)}
    write(path, {"event": "group_graded", "group": "g1"}, {"event": "group_dropped", "group": "g3"})
    write(path, {"event": "batch_cut", "step": 4, "groups": ["g1", "gone"]})
    assert shown() == {"g1": ("complete", 0), "g2": ("playing", 2)}
    write(path, {"event": "batch_shipped", "step": 4, "groups": ["g1"]})
    assert shown()["g1"] == ("shipped", 0)
    write(path, {"event": "step_finished", "step": 4})
    assert shown()["g1"] == ("not served", 0)
    # A retried episode counts by its new version, as in the buffer itself.
    write(path, {"event": "episode_retried", "episode": "g2.0", "version": 5})
    # What is in the next batch keeps its slot when this one is served.
    write(path, *opened("g4", 5), {"event": "batch_shipped", "step": 5, "groups": ["g4"]})
    write(path, {"event": "policy_applied", "version": 5})
    assert shown() == {"g2": ("playing", 2), "g4": ("shipped", 0)}
    write(path, {"event": "policy_applied", "version": 6})
    with path.open("a") as file:
        file.write('{"event": "group_aband')  # Half a line waits for its end.
    assert len(board.cells()) == 1
    with path.open("a") as file:
        file.write('oned", "group": "g2"}\nno JSON\n[1]\n')
    assert board.cells() == []


def test_a_new_launch_holds_none_of_the_old_slots_and_a_cut_journal_is_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    board = SlotBoard(path)
    write(path, {"event": "run_started", "version": 0}, *opened("g1", 0, 0))
    assert len(board.cells()) == 1
    write(path, resumed(0, step=2), *opened("g7", 2))
    assert [it["group"] for it in board.cells()] == ["g7"]
    path.write_text("")
    write(path, *opened("g9", 2))
    assert [it["group"] for it in board.cells()] == ["g9"]
    path.unlink()
    assert board.cells() == []


def test_a_resume_holds_again_what_was_held_at_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    board = SlotBoard(path)
    write(path, {"event": "run_started", "version": 0}, *opened("g0"), *opened("g9") * 30)
    write(path, *opened("g1", 0, 0), *ended("g1"), {"event": "group_graded", "group": "g1"})
    write(path, *opened("g2", 0), {"event": "batch_shipped", "step": 0, "groups": ["g0"]})
    at = len(path.read_text().splitlines())
    lost = [{"event": "batch_shipped", "step": 1, "groups": ["g1"]}, *opened("g3", 0)]
    write(path, *lost, {"event": "policy_applied", "version": 2})
    write(path, resumed(at, "g2", "g9", step=0), *lost, resumed(at, "g2", "g9", step=0))

    def shown(board: SlotBoard) -> dict[str, str]:
        return {it["group"]: f"{it['state']} {it['staleness']}" for it in board.cells()}

    assert shown(board) == {"g0": "shipped None", "g1": "complete 1"}
    # Of a journal that is opened late, what its end does not have is not known.
    text = path.read_text()
    monkeypatch.setattr(slots, "_FIRST_BYTES", len(text) - text.index('"g1"') + 60)
    late = SlotBoard(path)
    assert shown(late) == {"g1": "complete 1"}
    write(path, *opened("g3", 1), {"event": "step_finished", "step": 0})
    at = len(path.read_text().splitlines())
    write(path, {"event": "policy_applied", "version": 1})
    assert "g0" not in shown(board)
    write(path, resumed(at, step=1))
    assert shown(board) == {"g0": "not served None", "g1": "complete 1", "g3": "playing 0"}
    assert shown(late)["g3"] == "playing 0"
    assert board.counts() == {"not served": 1, "complete": 1, "playing": 1}


def test_more_slots_than_are_drawn_are_counted(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    write(root / "journal.jsonl", *(it for n in range(600) for it in opened(f"g{n}")))
    run = OpenRun(RunDirectory(root))
    found = run.overview()
    assert (len(found["slots"]), found["slots_held"]) == (512, {"playing": 600})

"""Files that only grow are brought back to a checkpoint, and nothing else is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forgetful_disk import ForgetfulDisk

from gradus.run.growing_files import (
    GIB,
    RecordLimit,
    note_sizes,
    truncate_to_sizes,
    truncate_to_step,
)
from gradus.run.paths import RunDirectory
from gradus.run.records import Cut, read_cuts


def add_metrics(run_dir: RunDirectory, *steps: int) -> None:
    run_dir.root.mkdir(exist_ok=True)
    with run_dir.metrics.open("a") as file:
        file.writelines(json.dumps({"step": step, "time": 1.0, "x": 1.0}) + "\n" for step in steps)


def add_episode(run_dir: RunDirectory, step: int, text: str, kind: str = "train") -> Path:
    path = run_dir.episodes / f"step_{step}" / f"{kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text + "\n")
    return path


def add_tokens(run_dir: RunDirectory, step: int, size: int = 1000, rank: int = 0) -> Path:
    path = run_dir.tokens / f"step_{step}" / f"rank_{rank}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def steps_in(run_dir: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run_dir.metrics.read_text().splitlines()]


def test_what_came_after_the_checkpoint_is_cut_and_what_came_before_stays(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0, 1)
    old = add_episode(run_dir, 1, "old")
    early = add_episode(run_dir, 2, "played early")
    sizes = note_sizes(run_dir, 2)
    add_metrics(run_dir, 2, 3)
    add_episode(run_dir, 2, "later")
    gone = add_episode(run_dir, 3, "later")
    truncate_to_sizes(run_dir, 2, sizes)
    assert steps_in(run_dir) == [0, 1]
    assert read_cuts(run_dir) == [Cut(sizes["metrics.jsonl"], step=2)]
    assert (old.read_text(), early.read_text()) == ("old\n", "played early\n")
    assert not gone.parent.exists()


def test_a_cut_is_known_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers would read on in the middle of records that they do not know."""
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0, 1)
    disk = ForgetfulDisk.under(run_dir.root, monkeypatch)
    truncate_to_step(run_dir, 1)
    length = run_dir.metrics.stat().st_size
    disk.lose_power()
    assert read_cuts(run_dir) == [Cut(length, step=1)]


def test_only_files_that_may_still_grow_are_noted(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0)
    add_episode(run_dir, 0, "final")
    add_episode(run_dir, 5, "open", kind="eval")
    assert list(note_sizes(run_dir, 5)) == ["episodes/step_5/eval.jsonl", "metrics.jsonl"]


def test_a_file_that_is_shorter_than_noted_stays_as_it_is(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0)
    truncate_to_sizes(run_dir, 0, {"metrics.jsonl": 1_000_000})
    assert steps_in(run_dir) == [0]


def test_without_noted_sizes_records_are_cut_by_their_step(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0, 1, 2, 3)
    kept, gone = add_episode(run_dir, 1, "a"), add_episode(run_dir, 2, "b")
    truncate_to_step(run_dir, 2)
    assert steps_in(run_dir) == [0, 1]
    assert kept.exists()
    assert not gone.exists()


def test_the_evaluation_of_the_weights_that_a_run_goes_on_from_stays(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    kept = [add_episode(run_dir, step, "a", kind="eval") for step in (0, 2)]
    run_dir.evaluation(2).write_text("{}")
    gone = [add_episode(run_dir, 2, "a"), add_episode(run_dir, 3, "b", kind="eval")]
    truncate_to_step(run_dir, 2)
    assert all(path.exists() for path in (*kept, run_dir.evaluation(2)))
    assert not any(path.exists() for path in gone)


def test_a_run_that_starts_again_begins_with_empty_records(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0, 1)
    with run_dir.metrics.open("a") as file:
        file.write('{"torn')
    truncate_to_step(run_dir, 0)
    assert run_dir.metrics.read_bytes() == b""


def test_a_run_directory_without_records_is_left_alone(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    truncate_to_step(run_dir, 0)
    truncate_to_sizes(run_dir, 0, {"metrics.jsonl": 3})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.shows("SEC15")
def test_folders_that_are_no_steps_are_left_alone(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    other = run_dir.episodes / "notes"
    other.mkdir(parents=True)
    truncate_to_step(run_dir, 0)
    assert other.exists()


@pytest.mark.shows("I10")
def test_beyond_the_limit_the_replay_goes_first_and_then_the_oldest_episodes(
    tmp_path: Path,
) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    tokens = run_dir.replay / "term_00000001" / "episodes.bin"
    tokens.parent.mkdir(parents=True)
    tokens.write_bytes(b"x" * 1000)
    files = [add_episode(run_dir, step, "x" * 999) for step in (2, 10, 9, 11)]
    unfinished = add_episode(run_dir, 2, "x" * 999, "eval")
    assert not RecordLimit(run_dir, 6000 / GIB).is_exceeded()
    limit = RecordLimit(run_dir, 4000 / GIB)
    told = limit.delete_oldest(12)
    assert "it cannot be replayed; the oldest episodes, of step 2 (" in told
    assert run_dir.replay_deleted.is_file()
    assert [path.exists() for path in (tokens, unfinished)] == [False, True]
    assert [path.parent.name for path in files if path.exists()] == ["step_10", "step_9", "step_11"]
    add_episode(run_dir, 12, "x" * 9999)
    assert limit.delete_oldest(12) == "", "each is said once"
    kept = [path.parent.name for path in run_dir.episodes.glob("*/*")]
    assert sorted(kept) == ["step_12", "step_2"], "what is being written stays"
    limit.delete_oldest(12)


@pytest.mark.parametrize("has_sizes", [True, False])
def test_the_tokens_of_steps_that_are_done_again_are_deleted(
    tmp_path: Path, has_sizes: bool
) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    add_metrics(run_dir, 0, 1, 2)
    kept, *gone = [add_tokens(run_dir, step) for step in (9, 10, 11)]
    if has_sizes:
        truncate_to_sizes(run_dir, 10, note_sizes(run_dir, 10))
    else:
        truncate_to_step(run_dir, 10)
    assert [path.parent.exists() for path in (kept, *gone)] == [True, False, False]


def test_the_limit_takes_the_tokens_of_the_oldest_steps_with_their_episodes(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    old = [
        add_tokens(run_dir, 2),
        add_tokens(run_dir, 2, rank=1),
        add_episode(run_dir, 2, "x" * 999),
    ]
    new = [add_tokens(run_dir, 10), add_episode(run_dir, 10, "x" * 999)]
    limit = RecordLimit(run_dir, 2500 / GIB)
    assert limit.is_exceeded()
    assert "of step 2 (" in limit.delete_oldest(11)
    assert [path.exists() for path in (*old, *new)] == [False] * 3 + [True] * 2
    assert not (run_dir.tokens / "step_2").exists()


def test_images_stay_and_cost_no_record_its_place(tmp_path: Path) -> None:
    """A group, a batch that is read again or a checkpoint may name what no record does."""
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.images.mkdir(parents=True)
    image = run_dir.images / ("a" * 64)
    image.write_bytes(b"x" * 9000)
    os.utime(image, (0, 0))
    records = [add_episode(run_dir, step, "x" * 999) for step in range(3)]
    assert not RecordLimit(run_dir, 3000 / GIB).is_exceeded()
    limit = RecordLimit(run_dir, 2500 / GIB)
    limit.delete_oldest(9)
    assert [path.exists() for path in (image, *records)] == [True, False, True, True]
    assert not limit.is_exceeded()

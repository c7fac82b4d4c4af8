"""From where a run continues, what it refuses, and what a resumed launch clears and shows."""

from __future__ import annotations

import io
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import commit
from configs import build_run_config

from gradus.config import LaunchConfig, ModelConfig, SftConfig, SftDataConfig, StrictConfig, resolve
from gradus.errors import ConfigError, CorruptStateError, RunDirectoryError
from gradus.files import read_json, write_json
from gradus.launch.job import Job
from gradus.launch.launch import launch
from gradus.launch.resume import (
    _check_journal,
    changed_settings,
    clear_for_resume,
    find_resume_point,
)
from gradus.launch.steps import Steps
from gradus.monitor import RL_COLUMNS
from gradus.plan.processes import LaunchPlan, log_file
from gradus.processes.started import ProcessSpec
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import RunLease, mark_run, open_run, preview_run, reopen_run
from gradus.run.paths import RunDirectory
from gradus.run.settings import differences

PLAYER = """
import json, os, pathlib, sys
run_dir, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
ready = run_dir / "ready" / "orchestrator.json"
ready.with_suffix(".new").write_text('{"done": true}')
ready.with_suffix(".new").rename(ready)  # whole at once: the launcher reads it when it appears
with open(run_dir / "metrics.jsonl", "a") as file:
    for step in range(first, 4):
        file.write(json.dumps({"step": step, "time": 1, "episode/reward/mean": step}) + "\\n")
"""


@pytest.fixture
def lease(tmp_path: Path) -> Any:
    """A run directory with a lease of its second term."""
    open_run(tmp_path, "demo", kind="rl").release()
    taken = reopen_run(tmp_path, "demo", kind="rl")
    taken.claim()
    yield taken
    taken.release()


def commit_checkpoint(lease: RunLease, step: int) -> Path:
    return commit(CheckpointStore(lease.run_dir, lease.term), step).folder


def finish(lease: RunLease, steps: int) -> None:
    write_json(lease.run_dir.summary, {"outcome": "done", "max_steps": steps})


def test_a_run_goes_on_from_its_newest_checkpoint(lease: RunLease) -> None:
    commit_checkpoint(lease, 2)
    commit_checkpoint(lease, 4)
    point = find_resume_point(lease, 6)
    assert point.step == 4
    assert point.describe(6) == "from checkpoint 4 of 6 steps"


@pytest.mark.shows("F19")
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    lease: RunLease, caplog: pytest.LogCaptureFixture
) -> None:
    commit_checkpoint(lease, 2)
    (commit_checkpoint(lease, 4) / "trainer" / "weights.bin").write_bytes(b"x")
    assert find_resume_point(lease, 6).step == 2
    assert "checkpoint 4 is not used" in caplog.text


@pytest.mark.shows("F19")
def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(lease: RunLease) -> None:
    """Also not for who committed it, and lives on while the trainer is replaced."""
    owner = CheckpointStore(lease.run_dir, lease.term)
    for step in (2, 4):
        commit(owner, step)
    damaged = owner.folders()[-1][1]
    (damaged / "trainer" / "weights.bin").write_bytes(b"x")
    assert find_resume_point(lease, 8).step == 2
    commit(owner, 6)
    owner.prune(2)
    assert [step for step, _ in owner.folders()] == [2, 6]
    assert damaged.with_name(f"{damaged.name}.damaged").is_dir()
    newest = owner.folders()[-1][1]
    (newest / "trainer" / "weights.bin").write_bytes(b"x")
    assert find_resume_point(lease, 8).step == 2
    # One damaged folder is kept to look at, not one of each.
    assert sorted(it.name for it in damaged.parent.iterdir()) == [
        "step_00000002",
        f"{newest.name}.damaged",
    ]


def test_a_dry_run_leaves_a_damaged_checkpoint_where_it_is(lease: RunLease, tmp_path: Path) -> None:
    commit_checkpoint(lease, 2)
    damaged = commit_checkpoint(lease, 4)
    (damaged / "trainer" / "weights.bin").write_bytes(b"x")
    lease.release()
    preview = preview_run(tmp_path, "demo", kind="rl", resume=True)
    assert find_resume_point(preview, 8).step == 2
    assert damaged.is_dir()


@pytest.mark.shows("F19")
def test_damaged_checkpoints_alone_end_with_the_exit_code_of_corrupt_state(lease: RunLease) -> None:
    (commit_checkpoint(lease, 4) / "trainer" / "weights.bin").write_bytes(b"x")
    with pytest.raises(CorruptStateError) as caught:
        find_resume_point(lease, 6)
    assert caught.value.exit_code == 78


def test_a_run_without_a_checkpoint_starts_again_and_says_so(lease: RunLease) -> None:
    point = find_resume_point(lease, 6)
    assert point.step is None
    assert point.describe(6) == "no checkpoint: starts again at step 1"


def test_every_folder_of_a_run_may_lie_on_another_disk(lease: RunLease, tmp_path: Path) -> None:
    """Those that a resume empties are emptied there. The trainer's own test is of `model`."""
    run_dir = lease.run_dir
    lease.release()
    folders = [path for path in run_dir.directly_below() if not path.suffix]
    for folder in folders:
        elsewhere = tmp_path / "large" / folder.name
        (elsewhere / "version_00000001").mkdir(parents=True)
        (elsewhere / "end.msgpack").touch()
        folder.symlink_to(elsewhere)
    again = reopen_run(run_dir.root.parent, run_dir.root.name, kind="rl")
    clear_for_resume(again, find_resume_point(again, 9))
    again.release()
    assert all(folder.is_symlink() for folder in folders)
    emptied = {folder for folder in folders if not list(folder.iterdir())}
    assert emptied == {run_dir.weights, run_dir.spool, run_dir.ready, run_dir.standing}


LINKED = ["journal.jsonl", "notices.log", "evaluation.json", "lease.lock", "logs/trainer.log"]


@pytest.mark.shows("SEC14")
@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("opening", [reopen_run, partial(preview_run, resume=True)])
def test_a_file_of_a_run_that_is_a_link_is_refused_by_name(
    lease: RunLease, tmp_path: Path, name: str, opening: Any
) -> None:
    lease.release()
    mine, path = tmp_path / "mine.txt", lease.run_dir.root / name
    mine.write_text("precious")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(mine)
    output_dir, run = lease.run_dir.root.parent, lease.run_dir.root.name
    with pytest.raises(RunDirectoryError, match=f"{name} is a link to .*mine.txt"):
        opening(output_dir, run, kind="rl")
    assert mine.read_text() == "precious"


def test_a_folder_of_a_run_may_be_a_link_and_so_may_what_its_owner_keeps_there(
    lease: RunLease, tmp_path: Path
) -> None:
    lease.release()
    (tmp_path / "large").mkdir()
    (lease.run_dir.root / "checkpoints").symlink_to(tmp_path / "large")
    (lease.run_dir.root / "notes.md").symlink_to(tmp_path / "notes.md")
    output_dir, run = lease.run_dir.root.parent, lease.run_dir.root.name
    reopen_run(output_dir, run, kind="rl").release()


def test_a_run_in_use_is_told_before_a_link_in_it(lease: RunLease, tmp_path: Path) -> None:
    (lease.run_dir.root / "notices.log").symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="in use"):
        reopen_run(lease.run_dir.root.parent, lease.run_dir.root.name, kind="rl")


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"\xff\xfe\x00",
        b'{"event": "run_started"}\n',
        # A line separator of Unicode, which JSON leaves as it is, ends no line.
        '{"task": "one\u2028two"}\n'.encode() * 6,
    ],
)
def test_a_journal_that_a_checkpoint_does_not_continue_is_refused(
    lease: RunLease, content: bytes | None
) -> None:
    commit_checkpoint(lease, 2)
    state = next(lease.run_dir.checkpoints.glob("step_*")) / "orchestrator" / "state.json"
    state.parent.mkdir(exist_ok=True)
    state.write_text('{"journal_lines": 7}')
    if content is not None:
        lease.run_dir.journal.write_bytes(content)
    with pytest.raises(CorruptStateError, match="journal"):
        _check_journal(lease.run_dir, state)
    lease.run_dir.journal.write_bytes(b"{}\n" * 7)
    _check_journal(lease.run_dir, state)


def test_what_is_no_file_and_a_lease_of_no_launch_are_refused_before_a_resume(
    lease: RunLease,
) -> None:
    lease.release()
    output_dir, run = lease.run_dir.root.parent, lease.run_dir.root.name
    preview = partial(preview_run, output_dir, run, kind="rl", resume=True)
    os.mkfifo(lease.run_dir.metrics)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is neither file nor folder"):
        preview()
    lease.run_dir.metrics.unlink()
    write_json(lease.run_dir.lease, {"term": 2**80, "owner": None})
    with pytest.raises(CorruptStateError, match="is not a lease"):
        preview()


def test_the_marker_of_another_run_is_named_as_the_reason(lease: RunLease) -> None:
    commit_checkpoint(lease, 2)
    mark_run(lease.run_dir, "rl", run_id="another")
    with pytest.raises(CorruptStateError, match=r"can be used, .* of run '.*'; it was copied"):
        find_resume_point(lease, 9)


def test_a_run_that_starts_again_keeps_the_newest_weights_that_it_published(
    lease: RunLease,
) -> None:
    for version in (66, 67):
        folder = lease.run_dir.version(version)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes([version]))
    point = find_resume_point(lease, 100)
    kept = lease.run_dir.root / "kept" / "version_00000067"
    assert point.describe(100).endswith(f"starts again at step 1, and keeps the weights in {kept}")
    clear_for_resume(lease, point)
    assert (kept / "model.safetensors").read_bytes() == bytes([67])
    assert not lease.run_dir.weights.exists()


def test_a_finished_run_is_left_alone(lease: RunLease) -> None:
    finish(lease, 6)
    point = find_resume_point(lease, 6)
    assert point.is_finished
    assert "raise max_steps" in point.describe(6)
    assert "all 6 steps are done" in find_resume_point(lease, 4).describe(4)


def test_a_solved_run_is_left_alone_until_it_is_given_more_steps(lease: RunLease) -> None:
    write_json(lease.run_dir.summary, {"outcome": "solved", "cause": "all earn 1", "max_steps": 9})
    assert find_resume_point(lease, 9).is_finished, "also without a checkpoint"
    commit_checkpoint(lease, 6)
    told = find_resume_point(lease, 9).describe(9)
    assert told.startswith("solved: all earn 1; to continue, raise max_steps")
    assert not find_resume_point(lease, 10).is_finished
    assert find_resume_point(lease, 10).step == 6
    ended = "the evaluation of version 6 earned 0.91, and target_reward is 0.9"
    write_json(lease.run_dir.summary, {"outcome": "solved", "cause": ended, "max_steps": 9})
    told = find_resume_point(lease, 9).describe(9)
    assert told.endswith("; to continue, raise target_reward"), "more steps would end at once"


@pytest.mark.parametrize("content", [[], 5, {"max_steps": 3}, {"outcome": "done"}])
def test_a_summary_of_another_shape_is_corrupt(lease: RunLease, content: Any) -> None:
    write_json(lease.run_dir.summary, content)
    with pytest.raises(CorruptStateError, match=r"summary\.json does not say"):
        find_resume_point(lease, 5)


def test_a_finished_run_goes_on_to_more_steps(lease: RunLease) -> None:
    finish(lease, 6)
    commit_checkpoint(lease, 6)
    assert find_resume_point(lease, 8).step == 6


def test_a_finished_run_without_a_checkpoint_is_not_thrown_away(lease: RunLease) -> None:
    finish(lease, 6)
    with pytest.raises(ConfigError, match="finished its 6 steps without a checkpoint"):
        find_resume_point(lease, 8)


def test_fewer_steps_than_the_checkpoint_has_are_refused(lease: RunLease) -> None:
    commit_checkpoint(lease, 6)
    with pytest.raises(ConfigError, match="max_steps = 5 is less than the 6 steps"):
        find_resume_point(lease, 5)


def launched(changes: dict[str, Any] | None = None) -> StrictConfig:
    return resolve(build_run_config(changes), run_dir=Path("r"), term=1).launched


def write_config(run_dir: RunDirectory) -> None:
    write_json(run_dir.config / "run.json", launched().model_dump(mode="json"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"name": "someone/other"}}, r"model\.name was 'someone/tiny'"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"orchestrator": {"groups_per_batch": 3}}, r"orchestrator\.groups_per_batch was"),
        (
            {"orchestrator": {"train": {"env": [{"id": "reverse-text", "group_size": 3}]}}},
            r"sources\.reverse-text\.group_size was",
        ),
        (
            {"orchestrator": {"train": {"env": [{"id": "required-format"}]}}},
            r"sources\.required-format\.name was None",
        ),
        (
            {"orchestrator": {"train": {"env": [{"id": "reverse-text", "taskset": {"n": 3}}]}}},
            r"train\.env\.reverse-text\.taskset",
        ),
        ({"trainer": {"lora": {}}}, r"trainer\.lora\.alpha was None and is 32"),
        (
            {"trainer": {"optimizer": {"type": "sgd", "lr": 0.1}}},
            r"trainer\.optimizer\.type was 'adamw'",
        ),
        ({"trainer": {"train_vision": True}}, r"trainer\.train_vision was False and is True"),
    ],
)
def test_changes_that_the_state_does_not_survive_are_refused_by_name(
    lease: RunLease, changes: dict[str, Any], named: str
) -> None:
    write_config(lease.run_dir)
    with pytest.raises(ConfigError, match=named):
        changed_settings(lease.run_dir, launched(changes), is_fresh=False)
    assert changed_settings(lease.run_dir, launched(changes), is_fresh=True)


def test_other_changes_are_told_once_and_more_steps_are_none(lease: RunLease) -> None:
    write_config(lease.run_dir)
    changes = {
        "max_steps": 90,
        "checkpoint": {"keep_last": 5},
        "trainer": {"optimizer": {"lr": 0.5}},
        "orchestrator": {"train": {"algo": {"scoring_timeout_seconds": 60.0}}},
    }
    lines = changed_settings(lease.run_dir, launched(changes), is_fresh=False)
    assert lines == [
        "orchestrator.train.algo.scoring_timeout_seconds was 900.0 and is 60.0",
        "trainer.optimizer.lr was 'auto' and is 0.5",
    ]


@pytest.mark.parametrize(
    ("changes", "is_finished"),
    [
        (None, True),
        ({"checkpoint": {"keep_last": 5}}, True),
        ({"orchestrator": {"max_empty_attempts": 50}}, False),
        ({"orchestrator": {"filters": []}}, False),
    ],
)
def test_a_solved_run_goes_on_where_a_setting_may_find_more_to_learn(
    lease: RunLease, changes: dict[str, Any] | None, is_finished: bool
) -> None:
    write_config(lease.run_dir)
    commit_checkpoint(lease, 2)
    write_json(lease.run_dir.summary, {"outcome": "solved", "cause": "all earn 1", "max_steps": 4})
    work = Steps("rl", 4, RL_COLUMNS)
    point = work.resume_point(lease)
    preparation = work.prepare(lease, LaunchPlan({"run": launched(changes)}, ()), point)
    assert preparation.is_finished == is_finished
    assert ("from checkpoint 2 of 4 steps" in preparation.lines[0]) != is_finished


def test_differences_name_list_members_by_their_name() -> None:
    was = {"a": [{"name": "x", "n": 1}, {"name": "y", "n": 2}], "b": [1, 2]}
    now = {"a": [{"name": "y", "n": 3}, {"name": "x", "n": 1}], "b": [1]}
    assert list(differences(was, now)) == [("a.y.n", 2, 3), ("b", [1, 2], [1])]


def test_members_of_a_list_that_share_a_name_are_told_apart() -> None:
    was, now = ({"a": [{"id": "x", "n": 1}, {"id": "x", "n": n}]} for n in (2, 3))
    assert list(differences(was, now)) == [("a.x#1.n", 2, 3)]


def test_what_dead_processes_left_is_cleared_and_the_rest_stays(lease: RunLease) -> None:
    run_dir = lease.run_dir
    commit_checkpoint(lease, 2)
    CheckpointStore(run_dir, 1).staging(4)
    for folder in (run_dir.ready, run_dir.spool, run_dir.weights, run_dir.logs):
        folder.mkdir()
        (folder / "file").write_text("x")
    finish(lease, 3)
    run_dir.journal.write_text("{}\n")
    run_dir.metrics.write_text('{"step": 1, "time": 1}\n{"step": 2, "time": 1}\n')
    clear_for_resume(lease, find_resume_point(lease, 4))
    left = {path.name for path in run_dir.root.iterdir() if not path.name.startswith(".")}
    kept = {"checkpoints", "logs", "journal.jsonl", "metrics.jsonl", "cuts.jsonl"}
    assert left == kept | {"lease.json", "lease.lock"}
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_00000002"]
    assert run_dir.metrics.read_text() == '{"step": 1, "time": 1}\n'


@pytest.mark.parametrize(("checkpoint", "left"), [(4, [2, 4]), (None, [])])
def test_versions_that_wait_for_their_evaluation_survive_the_steps_that_made_them(
    lease: RunLease, checkpoint: int | None, left: list[int]
) -> None:
    if checkpoint is not None:
        commit_checkpoint(lease, checkpoint)
    for version in (2, 4, 6):
        lease.run_dir.version(version).mkdir(parents=True)
    clear_for_resume(lease, find_resume_point(lease, 8), keeps_versions=True)
    names = sorted(path.name for path in lease.run_dir.weights.iterdir())
    assert names == [lease.run_dir.version(version).name for version in left]


def job_in(root: Path, *, max_steps: int = 4) -> Job:
    def plan(run_dir: RunDirectory, term: int, resume_step: int | None) -> LaunchPlan:
        argv = (sys.executable, "-c", PLAYER, str(run_dir.root), str(resume_step or 0))
        log, ready = log_file(run_dir, "orchestrator"), run_dir.ready_file("orchestrator")
        return LaunchPlan(
            {"run": launched()}, ((ProcessSpec("orchestrator", argv, {}, log, ready, True),),)
        )

    return Job("demo", root, "rl", LaunchConfig(), plan, Steps("rl", max_steps, RL_COLUMNS))


def test_a_resumed_launch_shows_only_new_steps_and_sums_up_all(tmp_path: Path) -> None:
    launch(job_in(tmp_path), io.StringIO())
    run_dir = RunDirectory(tmp_path / "demo")
    commit(CheckpointStore(run_dir, 1), 2)
    run_dir.summary.unlink()
    stream = io.StringIO()
    assert launch(job_in(tmp_path), stream, resume=True) == 0
    shown = stream.getvalue()
    assert "resume            from checkpoint 2 of 4 steps" in shown
    assert "step 2/4" not in shown
    assert "step 3/4" in shown
    steps = [json.loads(line)["step"] for line in run_dir.metrics.read_text().splitlines()]
    assert steps == [0, 1, 2, 3]
    summary = read_json(run_dir.summary)
    assert (summary["steps"], summary["reward_first"], summary["term"]) == (4, 0.0, 2)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    launch(job_in(tmp_path), io.StringIO())
    before = (tmp_path / "demo" / "metrics.jsonl").read_bytes()
    stream = io.StringIO()
    assert launch(job_in(tmp_path), stream, resume=True) == 0
    assert "finished: all 4 steps are done" in stream.getvalue()
    assert (tmp_path / "demo" / "metrics.jsonl").read_bytes() == before


def test_resuming_a_solved_run_starts_nothing_and_says_how_to_go_on(tmp_path: Path) -> None:
    launch(job_in(tmp_path), io.StringIO())
    run_dir = RunDirectory(tmp_path / "demo")
    ended = read_json(run_dir.summary) | {"outcome": "solved", "cause": "all earn 1"}
    write_json(run_dir.summary, ended)
    stream = io.StringIO()
    assert launch(job_in(tmp_path), stream, resume=True) == 0
    assert "solved: all earn 1; to continue, raise max_steps" in stream.getvalue()
    assert read_json(run_dir.summary) == ended


def test_a_dry_resume_says_where_it_would_go_on_and_clears_nothing(tmp_path: Path) -> None:
    launch(job_in(tmp_path), io.StringIO())
    run_dir = RunDirectory(tmp_path / "demo")
    run_dir.summary.unlink()
    stream = io.StringIO()
    assert launch(job_in(tmp_path), stream, resume=True, dry_run=True) == 0
    assert "no checkpoint: starts again" in stream.getvalue()
    assert run_dir.metrics.read_bytes()


def sft_launched(**data: Any) -> StrictConfig:
    config = SftConfig(model=ModelConfig(name="tiny"), data=SftDataConfig(**data))
    return resolve(config, run_dir=Path("r"), term=1).launched


def test_data_that_moved_is_told_and_left_to_its_digest(lease: RunLease) -> None:
    config = sft_launched(path="old/words.jsonl")
    write_json(lease.run_dir.config / "run.json", config.model_dump(mode="json"))
    moved = sft_launched(path="new/words.jsonl")
    assert changed_settings(lease.run_dir, moved, is_fresh=False) == [
        "data.path was 'old/words.jsonl' and is 'new/words.jsonl'"
    ]
    shuffled = sft_launched(path="old/words.jsonl", shuffle=False)
    with pytest.raises(ConfigError, match=r"data\.shuffle was True and is False"):
        changed_settings(lease.run_dir, shuffled, is_fresh=False)

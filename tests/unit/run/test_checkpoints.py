"""A checkpoint is whole or absent, and no fault takes away the one before it."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import (
    PARTS,
    Crash,
    FaultyFiles,
    commit,
    committed_names,
    new_run,
    stage,
)
from forgetful_disk import ForgetfulDisk

from gradus.errors import (
    ConfigError,
    CorruptStateError,
    ExitCode,
    FencedError,
    ProtocolError,
    StorageError,
)
from gradus.run.checkpoints import CheckpointLabel, CheckpointStore
from gradus.run.lease import MARKER_NAME, RunLease
from gradus.run.paths import RunDirectory
from gradus.sealed import FORMAT, MANIFEST_NAME, FileEntry, file_entry, open_sealed


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path)


def verify(folder: Path) -> None:
    open_sealed(folder, CheckpointLabel).verify()


def test_what_was_staged_is_found_after_the_commit(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    committed = commit(checkpoints, 10)
    found = CheckpointStore(run_dir, term=2).latest()
    assert found == committed
    assert found is not None
    assert found.step == 10
    assert found.folder.name == "step_00000010"
    assert (found.part("trainer") / "weights.bin").read_bytes().startswith(b"trainer 10")


def test_a_run_without_checkpoints_has_no_latest(run_dir: RunDirectory) -> None:
    assert CheckpointStore(run_dir, term=1).latest() is None


@pytest.mark.shows("F17", "I4")
def test_staging_alone_is_never_selected(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    commit(checkpoints, 10)
    stage(checkpoints, 20)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 10


@pytest.mark.shows("F18")
@pytest.mark.parametrize("part", PARTS)
def test_one_part_alone_is_not_committed(run_dir: RunDirectory, part: str) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    folder = stage(checkpoints, 10)
    shutil.rmtree(folder / part)
    with pytest.raises(ProtocolError, match=part):
        checkpoints.commit(10, PARTS)
    assert checkpoints.latest() is None


def test_a_part_that_nobody_named_is_not_committed(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    (stage(checkpoints, 10) / "stray").mkdir()
    with pytest.raises(ProtocolError, match="stray"):
        checkpoints.commit(10, PARTS)


def test_a_missing_part_is_named(run_dir: RunDirectory) -> None:
    checkpoint = commit(CheckpointStore(run_dir, term=1), 10)
    with pytest.raises(CorruptStateError, match="no part 'critic'"):
        checkpoint.part("critic")


def disk_operations(folder: Path) -> list[str]:
    """The operations of a commit and a prune, in order, with nothing going wrong."""
    run_dir = new_run(folder, "count")
    commit_three(run_dir, FaultyFiles())
    files = FaultyFiles()
    checkpoints = CheckpointStore(run_dir, 1, files)
    commit_and_prune(checkpoints)
    return files.operations


def commit_and_prune(checkpoints: CheckpointStore) -> None:
    commit(checkpoints, 40)
    checkpoints.prune(keep_last=2)


@pytest.mark.shows("F17")
def test_a_committed_checkpoint_is_whole_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run(tmp_path)
    disk = ForgetfulDisk.under(run_dir.root, monkeypatch)
    commit(CheckpointStore(run_dir, 1), 1)
    disk.lose_power()
    found = CheckpointStore(run_dir, 2).latest()
    assert found is not None
    assert found.step == 1


@pytest.mark.shows("F17")
def test_a_checkpoint_that_was_not_committed_leaves_no_half_of_one_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation may be the last one before the power goes."""
    counted, other = FaultyFiles(), new_run(tmp_path, "counted")
    commit(CheckpointStore(other, 1), 1)
    commit(CheckpointStore(other, 1, counted), 2)
    for at in range(len(counted.operations)):
        run_dir = new_run(tmp_path, f"run{at}")
        commit(CheckpointStore(run_dir, 1), 1)
        with monkeypatch.context() as patch:
            disk = ForgetfulDisk.under(run_dir.root, patch)
            with pytest.raises(Crash):
                commit(CheckpointStore(run_dir, 1, FaultyFiles(at, after=True)), 2)
            disk.lose_power()
        found = CheckpointStore(run_dir, 2).latest()
        assert found is not None
        names = committed_names(run_dir)
        assert len(names) == found.step, "every name that is not hidden is a whole checkpoint"


def commit_three(run_dir: RunDirectory, files: FaultyFiles) -> None:
    checkpoints = CheckpointStore(run_dir, 1, files)
    for step in (10, 20, 30):
        commit(checkpoints, step)


@pytest.mark.shows("F17", "I4")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path, after: bool) -> None:
    operations = disk_operations(tmp_path)
    rename = operations.index("rename")
    assert {"make_folder", "stage", "sync", "rename", "delete"} == set(operations)
    for at in range(len(operations)):
        run_dir = new_run(tmp_path, f"crash-{at}")
        commit_three(run_dir, FaultyFiles())
        checkpoints = CheckpointStore(run_dir, 1, FaultyFiles(at, after=after))
        with pytest.raises(Crash):
            commit_and_prune(checkpoints)
        is_committed = at > rename or (at == rename and after)
        survivor = CheckpointStore(run_dir, term=2)
        latest = survivor.latest()
        assert latest is not None
        assert latest.step == (40 if is_committed else 30), operations[at]
        survivor.discard_stale()
        assert all(name.startswith("step_") for name in names(run_dir)), operations[at]
        commit(survivor, 50)


def names(run_dir: RunDirectory) -> list[str]:
    return [path.name for path in run_dir.checkpoints.iterdir()]


@pytest.mark.shows("F23", "F27", "I4")
def test_a_disk_that_fills_up_at_any_operation_keeps_the_old_checkpoints(tmp_path: Path) -> None:
    operations = disk_operations(tmp_path)
    for at in range(operations.index("rename") + 1):
        run_dir = new_run(tmp_path, f"full-{at}")
        commit_three(run_dir, FaultyFiles())
        checkpoints = CheckpointStore(run_dir, 1, FaultyFiles(at, full=True))
        with pytest.raises(StorageError, match="bytes free") as failure:
            commit(checkpoints, 40)
        assert failure.value.exit_code is ExitCode.TRY_AGAIN
        assert committed_names(run_dir) == ["step_00000010", "step_00000020", "step_00000030"]
        assert commit(checkpoints, 40).step == 40, "the next try uses what was staged"


@pytest.mark.shows("F19", "F20")
@pytest.mark.parametrize("name", ["trainer/weights.bin", "orchestrator/weights.bin", MANIFEST_NAME])
@pytest.mark.parametrize("damage", ["cut", "flip", "grow", "empty", "missing"])
def test_damage_to_any_file_falls_back_and_says_so(
    run_dir: RunDirectory, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    commit(checkpoints, 10)
    path = commit(checkpoints, 20).folder / name
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:-10])
        case "flip":
            path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
        case "grow":
            path.write_bytes(content + b"\0")
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
    with caplog.at_level(logging.ERROR):
        latest = CheckpointStore(run_dir, term=2).latest()
    assert latest is not None
    assert latest.step == 10
    assert "checkpoint 20 is not used" in caplog.text
    assert name in caplog.text


@pytest.mark.shows("F20", "SEC24")
def test_one_flipped_bit_anywhere_in_the_manifest_is_noticed(run_dir: RunDirectory) -> None:
    path = commit(CheckpointStore(run_dir, term=1), 10).folder / MANIFEST_NAME
    content = path.read_bytes()
    for position, bit in itertools.product(range(len(content)), (1, 0x80)):
        flipped = content[position] ^ bit
        path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        with pytest.raises(CorruptStateError):
            verify(path.parent)


@pytest.mark.shows("F19")
@pytest.mark.parametrize("name", ["trainer/weights.bin", MANIFEST_NAME])
def test_a_file_that_was_cut_at_any_byte_falls_back(run_dir: RunDirectory, name: str) -> None:
    """Also of a machine that lost power behind the rename, with pages that never were written."""
    checkpoints = CheckpointStore(run_dir, term=1)
    commit(checkpoints, 10)
    path = commit(checkpoints, 20).folder / name
    content = path.read_bytes()
    for length in range(len(content)):
        for torn in (content[:length], content[:length] + bytes(len(content) - length)):
            path.write_bytes(torn)
            with pytest.raises(CorruptStateError):
                verify(path.parent)
    latest = CheckpointStore(run_dir, term=2).latest()
    assert latest is not None
    assert latest.step == 10


def test_a_checkpoint_that_its_run_deletes_while_it_is_read_is_not_damaged(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CheckpointStore(run_dir, term=1)
    commit(run, 10)
    steps = iter([20, 30])

    def hash_slowly(path: Path) -> FileEntry:
        """The run continues while a reader hashes."""
        if path.parent.parent.name == "step_00000010" and (step := next(steps, None)):
            commit(run, step)
            run.prune(2)
        return file_entry(path)

    monkeypatch.setattr("gradus.sealed.file_entry", hash_slowly)
    latest = CheckpointStore(run_dir, term=0).latest()
    assert latest is not None
    assert latest.step == 30


@pytest.mark.shows("F19", "I4")
def test_no_whole_checkpoint_at_all_ends_the_run(run_dir: RunDirectory) -> None:
    checkpoint = commit(CheckpointStore(run_dir, term=1), 10)
    (checkpoint.folder / "trainer/weights.bin").write_bytes(b"short")
    with pytest.raises(CorruptStateError, match="none of the 1 checkpoints") as failure:
        CheckpointStore(run_dir, term=2).latest()
    assert failure.value.exit_code is ExitCode.CORRUPT_STATE


@pytest.mark.shows("F21")
def test_a_file_of_another_step_is_noticed(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    old, new = commit(checkpoints, 10), commit(checkpoints, 20)
    shutil.copy(old.folder / "trainer/weights.bin", new.folder / "trainer/weights.bin")
    with pytest.raises(CorruptStateError, match=r"weights\.bin"):
        checkpoints.load(20)


def test_a_checkpoint_under_another_name_is_refused(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    folder = commit(checkpoints, 10).folder
    folder.rename(folder.with_name("step_00000090"))
    with pytest.raises(CorruptStateError, match="holds step 10"):
        checkpoints.load(90)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    first, second = new_run(tmp_path, "first"), new_run(tmp_path, "second")
    commit(CheckpointStore(first, term=1), 10)
    shutil.copytree(first.checkpoints, second.checkpoints)
    with pytest.raises(CorruptStateError, match="of run 'first'"):
        CheckpointStore(second, term=1).load(10)


def test_a_renamed_run_still_finds_its_checkpoints(tmp_path: Path, run_dir: RunDirectory) -> None:
    commit(CheckpointStore(run_dir, term=1), 10)
    run_dir.root.rename(tmp_path / "renamed")
    assert CheckpointStore(RunDirectory(tmp_path / "renamed"), term=2).load(10).step == 10


def test_a_run_without_marker_is_named_by_its_folder(tmp_path: Path, run_dir: RunDirectory) -> None:
    (run_dir.root / MARKER_NAME).unlink()
    assert commit(CheckpointStore(run_dir, term=0), 10).label.run_id == "demo"


@pytest.mark.shows("F29", "SEC23")
def test_a_pickle_beside_the_parts_is_never_read(run_dir: RunDirectory, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    checkpoint = commit(CheckpointStore(run_dir, term=1), 10)
    (checkpoint.folder / "trainer/.metadata").write_bytes(
        f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    )
    with pytest.raises(CorruptStateError, match=r"trainer/\.metadata"):
        CheckpointStore(run_dir, term=1).load(10)
    assert not canary.exists()


@pytest.mark.shows("SEC14")
@pytest.mark.parametrize("name", ["link", "pipe"])
def test_links_and_pipes_have_no_place_in_a_checkpoint(run_dir: RunDirectory, name: str) -> None:
    folder = commit(CheckpointStore(run_dir, term=1), 10).folder
    path = folder / "trainer/weights.bin"
    path.unlink()
    if name == "link":
        path.symlink_to(folder / "orchestrator/weights.bin")
    else:
        os.mkfifo(path)
    with pytest.raises(CorruptStateError, match="not a regular file"):
        verify(folder)


@pytest.mark.shows("F32", "I6")
def test_an_owner_with_an_old_term_commits_nothing(run_dir: RunDirectory) -> None:
    RunLease.take(run_dir).release()
    old = CheckpointStore(run_dir, term=1)
    stage(old, 10)
    RunLease.take(run_dir).release()
    with pytest.raises(FencedError):
        old.commit(10, PARTS)
    assert CheckpointStore(run_dir, term=2).latest() is None


@pytest.mark.shows("F22")
def test_a_step_that_is_reached_again_does_not_touch_the_old_checkpoint(
    run_dir: RunDirectory,
) -> None:
    old = commit(CheckpointStore(run_dir, term=1), 20, "old")
    again = CheckpointStore(run_dir, term=2)
    new = commit(again, 20, "new")
    assert open_sealed(old.folder, CheckpointLabel).label.term == 1
    assert again.latest() == new
    assert committed_names(run_dir) == ["step_00000020", "step_00000020.term_00000002"]
    commit(again, 30)
    again.prune(keep_last=2)
    assert committed_names(run_dir) == ["step_00000020.term_00000002", "step_00000030"]


@pytest.mark.shows("F22")
def test_a_damaged_step_that_is_reached_again_stays_until_the_new_one_verifies(
    run_dir: RunDirectory,
) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    commit(checkpoints, 10)
    damaged = commit(checkpoints, 20)
    (damaged.folder / "trainer/weights.bin").write_bytes(b"short")
    again = CheckpointStore(run_dir, term=2)
    commit(again, 20, "again")
    assert damaged.folder.exists()
    latest = CheckpointStore(run_dir, term=3).latest()
    assert latest is not None
    assert (latest.step, latest.label.term) == (20, 2)
    again.prune(keep_last=2)
    assert committed_names(run_dir) == ["step_00000010", "step_00000020.term_00000002"]


def test_the_same_step_is_not_committed_twice_in_one_term(run_dir: RunDirectory) -> None:
    commit(CheckpointStore(run_dir, term=1), 10)
    checkpoints = CheckpointStore(run_dir, term=2)
    commit(checkpoints, 10)
    stage(checkpoints, 10)
    with pytest.raises(StorageError, match="committed already"):
        checkpoints.commit(10, PARTS)


@pytest.mark.shows("I4")
def test_the_newest_and_the_landmarks_are_kept(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    for step in (10, 20, 30, 40, 50, 60):
        commit(checkpoints, step)
    checkpoints.prune(keep_last=2, keep_interval_steps=30)
    kept = ["step_00000030", "step_00000050", "step_00000060"]
    assert committed_names(run_dir) == kept
    checkpoints.prune(keep_last=1, keep_interval_steps=30)
    assert committed_names(run_dir) == kept, "two whole ones always stay"


@pytest.mark.shows("F28", "I4")
def test_damaged_checkpoints_do_not_count_as_kept(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    folders = [commit(checkpoints, step).folder for step in (10, 20, 30, 40)]
    (folders[2] / "trainer/weights.bin").write_bytes(b"short")
    CheckpointStore(run_dir, term=2).prune(keep_last=2)
    assert committed_names(run_dir) == ["step_00000020", "step_00000030", "step_00000040"]


@pytest.mark.shows("F28")
@pytest.mark.parametrize("operation", ["rename", "delete"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    run_dir: RunDirectory, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    for step in (10, 20, 30):
        commit(checkpoints, step)
    at = 0 if operation == "rename" else 1
    CheckpointStore(run_dir, 1, FaultyFiles(at, full=True)).prune(keep_last=2)
    assert "stays" in caplog.text
    latest = CheckpointStore(run_dir, term=2).latest()
    assert latest is not None
    assert latest.step == 30


def test_stale_staging_of_older_terms_goes_and_own_stays(run_dir: RunDirectory) -> None:
    old, new = CheckpointStore(run_dir, term=1), CheckpointStore(run_dir, term=2)
    stage(old, 10)
    own = stage(new, 20)
    new.discard_stale()
    assert [path.name for path in run_dir.checkpoints.iterdir()] == [own.name]
    new.discard(20)
    assert list(run_dir.checkpoints.iterdir()) == []
    new.discard(20)


def test_stale_staging_of_a_run_without_checkpoints_is_nothing(run_dir: RunDirectory) -> None:
    CheckpointStore(run_dir, term=1).discard_stale()
    assert not run_dir.checkpoints.exists()


def test_a_step_without_checkpoint_is_refused_with_those_there_are(run_dir: RunDirectory) -> None:
    checkpoints = CheckpointStore(run_dir, term=1)
    commit(checkpoints, 10)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 15; there are \[10\]"):
        checkpoints.load(15)


@pytest.mark.shows("F35")
def test_another_format_is_refused_with_its_number(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.sealed.FORMAT", FORMAT + 1)
    folder = commit(CheckpointStore(run_dir, term=1), 10).folder
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match=f"format {FORMAT + 1}, this version .* reads format {FORMAT}"
    ):
        verify(folder)
    with pytest.raises(ConfigError, match="use the version that wrote it"):
        CheckpointStore(run_dir, term=2).latest()

"""A sealed folder vouches for every byte of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import Crash, FaultyFiles
from forgetful_disk import ForgetfulDisk

from gradus.errors import ConfigError, CorruptStateError, StorageError
from gradus.files import DurableFiles, PatientFiles, file_digest
from gradus.heartbeat import ALIVE_VARIABLE
from gradus.run.checkpoints import CheckpointLabel
from gradus.sealed import (
    FORMAT,
    MANIFEST_NAME,
    SealedFolder,
    contents_digest,
    discard_unfinished,
    file_entries,
    open_sealed,
    seal,
    stage,
)
from gradus.weights.published import VersionLabel, verify_version

LABEL = VersionLabel(version=3, term=1)


def seal_two_files(folder: Path, *, label: VersionLabel = LABEL) -> SealedFolder[VersionLabel]:
    files = DurableFiles()
    with stage(folder, files) as staging:
        files.stage(staging / "model.safetensors", b"weights" * 100)
        files.make_folder(staging / "inner")
        files.stage(staging / "inner" / "config.json", b"{}")
        return seal(staging, folder, label, files=files)


@pytest.fixture
def sealed(tmp_path: Path) -> SealedFolder[VersionLabel]:
    return seal_two_files(tmp_path / "version")


def test_what_was_written_is_durable_to_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    disk = ForgetfulDisk.under(folder, monkeypatch)
    DurableFiles().write(folder / "state", b"all of it")
    DurableFiles().sync(folder)
    disk.lose_power()
    assert (folder / "state").read_bytes() == b"all of it"


def test_a_sealed_folder_verifies(sealed: SealedFolder[VersionLabel]) -> None:
    found = open_sealed(sealed.path, VersionLabel)
    found.verify()
    assert found == sealed
    assert (found.label, set(found.files)) == (LABEL, {"model.safetensors", "inner/config.json"})
    assert found.read("inner/config.json") == b"{}"
    assert [path.name for path in sealed.path.parent.iterdir()] == ["version"]


@pytest.mark.parametrize("what", ["a folder", "a file"])
def test_whoever_ends_what_is_silent_sees_that_files_are_read(
    sealed: SealedFolder[VersionLabel], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALIVE_VARIABLE, str(tmp_path / "alive"))
    if what == "a file":
        file_digest(sealed.path / MANIFEST_NAME)
    else:
        sealed.verify()
    assert (tmp_path / "alive").exists()


def test_the_digest_is_known_before_the_folder_is_sealed(
    sealed: SealedFolder[VersionLabel],
) -> None:
    assert contents_digest(LABEL, file_entries(sealed.path)) == sealed.digest


def test_another_label_has_another_digest(
    sealed: SealedFolder[VersionLabel], tmp_path: Path
) -> None:
    same = seal_two_files(tmp_path / "same")
    other = seal_two_files(tmp_path / "other", label=VersionLabel(version=4, term=1))
    assert same.digest == sealed.digest
    assert other.digest != sealed.digest


@pytest.mark.shows("F20")
def test_one_flipped_bit_is_refused(sealed: SealedFolder[VersionLabel]) -> None:
    path = sealed.path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    for verify in (sealed.verify, lambda: sealed.read("model.safetensors")):
        with pytest.raises(CorruptStateError, match=r"model\.safetensors"):
            verify()


@pytest.mark.parametrize("size", [10, 1000])
def test_a_file_of_another_size_is_refused(sealed: SealedFolder[VersionLabel], size: int) -> None:
    os.truncate(sealed.path / "model.safetensors", size)
    with pytest.raises(CorruptStateError, match=f"{size} bytes"):
        sealed.verify()
    with pytest.raises(CorruptStateError, match="the manifest says 700"):
        sealed.read("model.safetensors")


def test_a_missing_file_is_refused(sealed: SealedFolder[VersionLabel]) -> None:
    (sealed.path / "inner/config.json").unlink()
    with pytest.raises(CorruptStateError, match="missing"):
        sealed.verify()
    with pytest.raises(CorruptStateError, match="cannot be read: No such file"):
        sealed.read("inner/config.json")


@pytest.mark.parametrize("name", ["payload.py", "inner/.hidden"])
def test_an_extra_file_is_refused(sealed: SealedFolder[VersionLabel], name: str) -> None:
    (sealed.path / name).write_bytes(b"x")
    with pytest.raises(CorruptStateError, match=name):
        sealed.verify()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_in_place_of_a_file_is_refused_at_once(
    sealed: SealedFolder[VersionLabel], kind: str
) -> None:
    path = sealed.path / "inner/config.json"
    path.unlink()
    if kind == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    with pytest.raises(CorruptStateError, match="not a regular file"):
        sealed.verify()
    with pytest.raises(CorruptStateError, match=r"cannot be read|not a regular file"):
        sealed.read("inner/config.json")


@pytest.mark.shows("F34", "SEC14")
@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", "nul\0", MANIFEST_NAME])
def test_names_that_leave_the_folder_are_refused(
    sealed: SealedFolder[VersionLabel], name: str
) -> None:
    files = {**sealed.files, name: sealed.files["model.safetensors"]}
    with pytest.raises(CorruptStateError, match="not in the manifest"):
        SealedFolder(sealed.path, LABEL, files, sealed.digest).verify()


def test_a_folder_without_manifest_is_refused(sealed: SealedFolder[VersionLabel]) -> None:
    (sealed.path / MANIFEST_NAME).unlink()
    with pytest.raises(CorruptStateError, match=MANIFEST_NAME):
        open_sealed(sealed.path, VersionLabel)


def test_a_folder_of_another_kind_is_refused(sealed: SealedFolder[VersionLabel]) -> None:
    with pytest.raises(CorruptStateError, match="is not a manifest"):
        open_sealed(sealed.path, CheckpointLabel)


@pytest.mark.shows("F35")
def test_another_format_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.sealed.FORMAT", FORMAT + 1)
    folder = seal_two_files(tmp_path / "version").path
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}, this version .* format {FORMAT}"):
        open_sealed(folder, VersionLabel)


def test_a_refusal_at_the_last_moment_leaves_no_folder(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StorageError("not now")

    files = DurableFiles()
    with pytest.raises(StorageError, match="not now"), stage(tmp_path / "x", files) as staging:
        seal(staging, tmp_path / "x", LABEL, before_rename=refuse, files=files)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_full_disk_refuses_goes(tmp_path: Path) -> None:
    files = FaultyFiles(2, full=True)
    with pytest.raises(StorageError, match="bytes free"), stage(tmp_path / "x", files) as staging:
        files.stage(staging / "a", b"a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.shows("F27")
def test_a_disk_that_fails_while_a_folder_is_read_back_is_named(tmp_path: Path) -> None:
    failed = OSError(errno.EIO, "Input/output error")
    with (
        pytest.raises(StorageError, match="Input/output error"),
        stage(tmp_path / "x", DurableFiles()),
    ):
        raise failed
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_not_the_disks_is_not_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), stage(tmp_path / "x", DurableFiles()):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_a_version_is_verified_by_the_digest_that_was_announced(
    sealed: SealedFolder[VersionLabel],
) -> None:
    assert verify_version(sealed.path, sealed.digest) == sealed
    with pytest.raises(CorruptStateError, match="announced; publish the version again"):
        verify_version(sealed.path, "0" * 64)
    (sealed.path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptStateError, match=r"5 bytes.*; publish the version again"):
        verify_version(sealed.path, sealed.digest)


def test_verifying_a_version_does_not_load_torch() -> None:
    check = "import sys, gradus.weights.published; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.shows("F17")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_operation_leaves_the_folder_absent_or_whole(
    tmp_path: Path, after: bool
) -> None:
    def seal_with(files: FaultyFiles, target: Path) -> None:
        with stage(target, files) as staging:
            files.stage(staging / "a", b"a")
            seal(staging, target, LABEL, files=files)

    files = FaultyFiles()
    seal_with(files, tmp_path / "count")
    for at, operation in enumerate(files.operations):
        target = tmp_path / f"crash-{at}"
        with pytest.raises(Crash):
            seal_with(FaultyFiles(at, after=after), target)
        has_name = at > files.operations.index("rename") - after
        assert target.exists() == has_name, operation
        if has_name:
            open_sealed(target, VersionLabel).verify()
        discard_unfinished(tmp_path, DurableFiles(), last_term=0)
        assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_disk_that_has_room_again_takes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradus.files.FULL_DISK_PAUSE_SECONDS", 0.0)
    tries = iter([errno.ENOSPC, errno.EDQUOT])

    def write(path: Path) -> None:
        path.write_bytes(b"half")
        if (number := next(tries, None)) is not None:
            raise OSError(number, os.strerror(number))
        path.write_bytes(b"whole")

    PatientFiles().stage_by(tmp_path / "x", write, num_bytes=5)
    assert (tmp_path / "x").read_bytes() == b"whole"
    assert caplog.text.count("waiting for room") == 2

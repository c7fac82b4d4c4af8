"""What `gradus serve` finds behind its first word, and what it refuses."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import commit, new_run

from gradus.cli.main import main
from gradus.cli.serve import ServedSource, find_source, model_directory, read_token
from gradus.errors import ConfigError, ExitCode, FullDiskError, StorageError
from gradus.files import write_json
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def make_run(
    tmp_path: Path,
    *,
    versions: Sequence[int] = (),
    checkpoints: Sequence[int] = (),
    is_done: bool = False,
    has_model: bool = False,
) -> RunDirectory:
    run_dir = new_run(tmp_path)
    for version in versions:
        make_model(run_dir.version(version))
    for step in checkpoints:
        commit(CheckpointStore(run_dir, 0), step)
    if has_model:
        make_model(run_dir.model)
    if is_done:
        write_json(run_dir.summary, {"outcome": "done"})
    return run_dir


def test_a_model_directory_is_served_under_its_name(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    assert find_source(str(model)) == ServedSource(str(model), "tiny")
    assert find_source("someone/tiny") == ServedSource("someone/tiny", "someone/tiny")


def test_the_model_of_a_run_has_the_name_of_the_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, has_model=True)
    assert find_source(str(run_dir.model)).name == "demo"


def test_a_run_that_is_done_serves_its_final_model(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, versions=[2], checkpoints=[2], is_done=True, has_model=True)
    assert find_source(str(run_dir.root)) == ServedSource(str(run_dir.model), "demo")


@pytest.mark.parametrize(
    ("versions", "checkpoints", "expected"),
    [
        ([2, 10], [4], "weights/version_00000010"),
        ([4], [4], "weights/version_00000004"),
        ([4], [2, 10], "checkpoints/step_00000010"),
        ([], [2], "checkpoints/step_00000002"),
        ([], [], "model"),
    ],
)
def test_a_run_that_goes_on_serves_the_newest_that_it_has_kept(
    tmp_path: Path, versions: list[int], checkpoints: list[int], expected: str
) -> None:
    run_dir = make_run(tmp_path, versions=versions, checkpoints=checkpoints, has_model=True)
    found = find_source(str(run_dir.root))
    assert found.place == str(run_dir.root / expected)
    assert found.is_checkpoint == expected.startswith("checkpoints")


def test_a_version_that_its_run_deletes_is_served_to_the_end(tmp_path: Path) -> None:
    version = make_run(tmp_path, versions=[2]).version(2)
    with model_directory(find_source(str(version.parent.parent))) as folder:
        shutil.rmtree(version)
        assert sorted(it.name for it in Path(folder).iterdir()) == [
            *("config.json", "model.safetensors")
        ]
    assert not Path(folder).exists()


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_full_disk_is_not_told_as_a_version_that_is_gone(
    is_deleted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_run(tmp_path, versions=[2]).version(2)

    def no_link(*_: str) -> None:
        raise OSError(errno.EXDEV, "another disk")

    def no_room(source: str, _: str) -> None:
        if is_deleted:
            shutil.rmtree(version)
            raise FileNotFoundError(source)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(shutil, "copyfile", no_room)
    said = "was deleted meanwhile" if is_deleted else "No space left on device.*make room"
    kind = StorageError if is_deleted else FullDiskError
    with pytest.raises(kind, match=said), model_directory(ServedSource(str(version), "demo")):
        pass


def test_a_version_is_linked_beside_its_run_where_temporary_files_have_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_run(tmp_path, versions=[2]).version(2)
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk")
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    with model_directory(ServedSource(str(version), "demo")) as folder:
        assert (Path(folder) / "config.json").samefile(version / "config.json")


def test_a_version_that_is_an_adapter_is_no_model(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, versions=[9], checkpoints=[4])
    (run_dir.version(9) / "config.json").unlink()
    assert find_source(str(run_dir.root)).is_checkpoint


def test_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, checkpoints=[4, 8])
    folder = run_dir.checkpoints / "step_00000004"
    assert find_source(str(folder)) == ServedSource(
        str(folder), "demo-step_00000004", is_checkpoint=True
    )


def test_a_folder_with_nothing_to_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a model directory"):
        find_source(str(tmp_path))
    with pytest.raises(ConfigError, match="has trained nothing that could be served"):
        find_source(str(make_run(tmp_path).root))


def test_a_token_file_is_made_once_and_read_after(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_token(str(file))
    assert len(token) > 30
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_token(str(file)) == token
    assert read_token(None) != token


@pytest.mark.parametrize("content", ["", "\n", "two words", "ä"])
def test_a_token_that_no_header_could_carry_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="one word of printable ASCII"):
        read_token(str(tmp_path / "token"))


OPEN = ("--no-token", "--inference.allow_public_bind", "true")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "model: missing"),
        (["none/such/model", "--no-token", "--token-file", "x"], "contradict"),
        (["./none"], "model: './none': no such directory"),
        (["MODEL/none"], "no such directory"),
        (["no_name_of_the_hub"], "is neither a directory here nor a name on the hub"),
        (["someone/no--name"], "is not a directory (seen from"),
        (["MODEL", *OPEN, "--host", "0.0.0.0"], "--no-token: '0.0.0.0' can be reached"),
        (
            ["MODEL", *OPEN, "--host", "0.0.0.0", "--replicas", "2"],
            "--no-token: '0.0.0.0' can be reached",
        ),
        (["MODEL", "--host", "0.0.0.0"], "allow_public_bind"),
        (["MODEL", "--port", "many"], "inference.port"),
        (["MODEL", "--token-file", "MODEL"], "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused_before_vllm_is_loaded(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make_model(tmp_path / "tiny"))
    assert main(["serve", *(it.replace("MODEL", model) for it in words)]) == ExitCode.CONFIG
    shown = capsys.readouterr()
    assert said in shown.err
    assert "serves at" not in shown.out

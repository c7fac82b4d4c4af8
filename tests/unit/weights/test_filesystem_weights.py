"""Versions appear whole, verified, in order, and old ones go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import wait_until
from safetensors.torch import load_file
from torch import Tensor

from gradus import files
from gradus.errors import CorruptStateError, FencedError, RunDirectoryError, StorageError
from gradus.files import DurableFiles
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.weights.filesystem import FilesystemWeights, published_versions
from gradus.weights.published import verify_version
from gradus.weights.tensor_files import write_tensors

pytestmark = pytest.mark.torch

TENSORS = [("a.weight", torch.arange(6.0).view(2, 3)), ("b.bias", torch.ones(4).bfloat16())]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def build_weights(run_dir: RunDirectory, **options: int) -> FilesystemWeights:
    files = {"config.json": b"{}"}
    return FilesystemWeights(run_dir, **{"term": 0, **options}, extra_files=files)


def test_a_published_version_verifies_and_holds_the_tensors(run_dir: RunDirectory) -> None:
    published = build_weights(run_dir).publish_version(3, TENSORS)
    assert published.version == 3
    assert published.directory == run_dir.version(3)
    assert set(verify_version(published.directory, published.digest).files) == {
        "config.json",
        "model.safetensors",
    }
    loaded = load_file(published.directory / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS)


def test_the_manifest_carries_version_and_term(run_dir: RunDirectory) -> None:
    published = build_weights(run_dir, term=4).publish_version(1, TENSORS)
    label = verify_version(published.directory, published.digest).label
    assert (label.version, label.term) == (1, 4)


def test_a_tampered_version_is_refused(run_dir: RunDirectory) -> None:
    published = build_weights(run_dir).publish_version(1, TENSORS)
    path = published.directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match=r"model\.safetensors"):
        verify_version(published.directory, published.digest)


def test_where_another_deletes_versions_all_are_kept_over_terms(run_dir: RunDirectory) -> None:
    for term in (1, 2):
        weights = FilesystemWeights(run_dir, term=term, extra_files={}, keep_published=None)
        for version in range(10 * term, 10 * term + 4):
            weights.publish_version(version, TENSORS)
    found = published_versions(run_dir)
    assert [it.version for it in found] == [10, 11, 12, 13, 20, 21, 22, 23]
    assert all(verify_version(it.directory, it.digest).label.version == it.version for it in found)


def test_only_complete_versions_are_listed(run_dir: RunDirectory) -> None:
    assert published_versions(run_dir) == []
    (run_dir.weights / ".version_00000001.tmp-0").mkdir(parents=True)
    assert published_versions(run_dir) == []


def test_only_the_newest_versions_are_kept(run_dir: RunDirectory) -> None:
    weights = build_weights(run_dir, keep_published=2)
    for version in range(1, 5):
        weights.publish_version(version, TENSORS)
    names = sorted(path.name for path in run_dir.weights.iterdir())
    assert names == ["version_00000003", "version_00000004"]


@pytest.mark.shows("SEC15")
def test_other_things_in_the_folder_are_not_deleted(run_dir: RunDirectory) -> None:
    weights = build_weights(run_dir, keep_published=1)
    (run_dir.weights / "notes").mkdir()
    (run_dir.weights / "version_00000000").symlink_to(run_dir.root, target_is_directory=True)
    weights.publish_version(9, TENSORS)
    assert (run_dir.weights / "notes").is_dir()
    assert run_dir.root.is_dir()


def test_a_failed_publish_leaves_no_version(run_dir: RunDirectory) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield TENSORS[0]
        raise OSError("disk full")

    weights = build_weights(run_dir)
    with pytest.raises(OSError, match="disk full"):
        weights.publish_version(1, broken())
    assert not run_dir.version(1).exists()
    assert weights.publish_version(1, TENSORS).version == 1


def test_what_an_older_owner_left_unfinished_is_deleted(run_dir: RunDirectory) -> None:
    for name in (".version_00000001.tmp-1", ".version_00000001.tmp-9"):
        (run_dir.weights / name).mkdir(parents=True)
    build_weights(run_dir, term=2)
    assert [path.name for path in run_dir.weights.iterdir()] == [".version_00000001.tmp-9"]


@pytest.mark.shows("F32", "I6")
def test_a_newer_owner_fences_the_publisher(run_dir: RunDirectory) -> None:
    weights = build_weights(run_dir, term=0)
    lease = RunLease.take(run_dir)
    with pytest.raises(FencedError, match="term 1"):
        weights.publish_version(1, TENSORS)
    lease.release()
    assert not run_dir.version(1).exists()


@pytest.mark.shows("F01")
def test_a_version_that_is_made_again_stays_as_it_was(run_dir: RunDirectory) -> None:
    first = build_weights(run_dir).publish_version(1, TENSORS)
    written = (first.directory / "model.safetensors").stat().st_mtime_ns
    weights = build_weights(run_dir)
    assert weights.newest == 1
    assert weights.publish_version(1, TENSORS) == first
    assert (first.directory / "model.safetensors").stat().st_mtime_ns == written
    assert os.listdir(run_dir.weights) == [first.directory.name]


def test_a_version_that_is_made_again_with_other_bits_is_refused_or_stays(
    run_dir: RunDirectory,
) -> None:
    first = build_weights(run_dir).publish_version(1, TENSORS)
    others = [("a.weight", torch.ones(2, 3)), TENSORS[1]]
    with pytest.raises(RunDirectoryError, match=f"digest {first.digest[:16]}.*promises the same"):
        build_weights(run_dir).publish_version(1, others)
    assert build_weights(run_dir, is_exact=False).publish_version(1, others) == first
    assert os.listdir(run_dir.weights) == [first.directory.name]


@pytest.mark.shows("I6")
def test_a_version_of_another_term_is_not_overwritten(run_dir: RunDirectory) -> None:
    FilesystemWeights(run_dir, term=1, extra_files={}).publish_version(1, TENSORS)
    again = FilesystemWeights(run_dir, term=2, extra_files={}, keep_published=None)
    with pytest.raises(RunDirectoryError, match="of another term"):
        again.publish_version(1, TENSORS)


def test_many_bytes_are_split_over_shards_with_an_index(tmp_path: Path) -> None:
    tensors = [(f"layer{i}", torch.full((4,), float(i))) for i in range(5)]
    write_tensors(tmp_path, tensors, DurableFiles(), shard_bytes=32)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"] == {"total_size": 80}
    for name, tensor in tensors:
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_published_files_are_plain_and_readable(run_dir: RunDirectory) -> None:
    directory = build_weights(run_dir).publish_version(1, TENSORS).directory
    assert all(path.is_file() and os.access(path, os.R_OK) for path in directory.iterdir())


def test_versions_of_older_terms_make_room_for_those_of_a_resumed_run(
    run_dir: RunDirectory,
) -> None:
    old = build_weights(run_dir, term=1)
    for version in (3, 4):
        old.publish_version(version, TENSORS)
    (run_dir.version(4) / "manifest.json").write_bytes(b"")
    (run_dir.weights / "version_00000007").symlink_to(run_dir.root)
    published = build_weights(run_dir, term=2).publish_version(3, TENSORS)
    assert verify_version(published.directory, published.digest).label.term == 2
    names = sorted(path.name for path in run_dir.weights.iterdir())
    assert names == ["version_00000003", "version_00000007"]


@pytest.mark.shows("F24")
def test_a_version_waits_on_a_full_disk_until_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "FULL_DISK_PAUSE_SECONDS", 0.01)
    weights = build_weights(RunDirectory(small_disk))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    tensors = [("w", torch.ones(1 << 19))]
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(weights.publish_version, 1, iter(tensors))
        wait_until(lambda: "waiting for room" in caplog.text)
        assert not publishing.done()
        ballast.unlink()
        published = publishing.result(timeout=60)
    assert torch.equal(load_file(published.directory / "model.safetensors")["w"], tensors[0][1])
    assert "No space left" in caplog.text


def test_a_full_disk_is_named_and_what_was_written_goes(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FULL_DISK_SECONDS", 0.0)
    weights = build_weights(RunDirectory(small_disk))
    weights.publish_version(1, TENSORS)
    large = [("w", torch.zeros(2 << 20))]
    with pytest.raises(StorageError, match=r"No space left.*make room"):
        weights.publish_version(2, large)
    names = [path.name for path in RunDirectory(small_disk).weights.iterdir()]
    assert names == ["version_00000001"]

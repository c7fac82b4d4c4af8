"""A manifest vouches for every byte of a published version."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.errors import CorruptStateError
from gradus.weights.manifest import (
    MANIFEST_NAME,
    Manifest,
    build_manifest,
    file_entry,
    manifest_digest,
    verify,
)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    (tmp_path / "config.json").write_bytes(b"{}")
    return tmp_path


def seal(directory: Path) -> str:
    entries = {path.name: file_entry(path) for path in sorted(directory.iterdir())}
    manifest = build_manifest(3, 1, entries)
    (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest_digest(manifest)


def test_a_sealed_version_verifies(version: Path) -> None:
    manifest = verify(version, seal(version))
    assert manifest.version == 3
    assert manifest.term == 1
    assert set(manifest.files) == {"model.safetensors", "config.json"}


def test_one_flipped_bit_is_refused(version: Path) -> None:
    digest = seal(version)
    path = version / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match=r"model\.safetensors"):
        verify(version, digest)


def test_a_truncated_file_is_refused(version: Path) -> None:
    digest = seal(version)
    os.truncate(version / "model.safetensors", 10)
    with pytest.raises(CorruptStateError, match="10 bytes"):
        verify(version, digest)


def test_a_missing_file_is_refused(version: Path) -> None:
    digest = seal(version)
    (version / "config.json").unlink()
    with pytest.raises(CorruptStateError, match="missing"):
        verify(version, digest)


def test_an_extra_file_is_refused(version: Path) -> None:
    digest = seal(version)
    (version / "payload.py").write_bytes(b"x")
    with pytest.raises(CorruptStateError, match=r"payload\.py"):
        verify(version, digest)


def test_a_link_in_place_of_a_file_is_refused(version: Path, tmp_path: Path) -> None:
    digest = seal(version)
    path = version / "config.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CorruptStateError, match="cannot read"):
        verify(version, digest)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(version: Path) -> None:
    digest = seal(version)
    path = version / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptStateError, match="regular"):
        verify(version, digest)


def test_another_digest_is_refused(version: Path) -> None:
    seal(version)
    with pytest.raises(CorruptStateError, match="announced"):
        verify(version, "0" * 64)


def test_a_directory_without_manifest_is_refused(version: Path) -> None:
    with pytest.raises(CorruptStateError, match=MANIFEST_NAME):
        verify(version, "0" * 64)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "nul\0", MANIFEST_NAME])
def test_names_that_leave_the_directory_are_refused(name: str, version: Path) -> None:
    entry = file_entry(version / "config.json")
    with pytest.raises(CorruptStateError, match="plain file name"):
        build_manifest(0, 0, {name: entry})


def test_bytes_that_are_no_manifest_are_refused(version: Path) -> None:
    raw = b'{"version": "three"}'
    (version / MANIFEST_NAME).write_bytes(raw)
    with pytest.raises(CorruptStateError, match="not a manifest"):
        verify(version, hashlib.sha256(raw).hexdigest())


def test_equal_manifests_have_equal_bytes(version: Path) -> None:
    entry = file_entry(version / "config.json")
    one = Manifest(1, 0, {"a": entry, "b": entry})
    other = Manifest(1, 0, {"b": entry, "a": entry})
    assert one.encode() == other.encode()


def test_the_module_does_not_load_torch() -> None:
    check = "import sys, gradus.weights.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

"""A manifest names every file of a published version with its size and SHA-256."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from gradus.errors import CorruptStateError

MANIFEST_NAME = "manifest.json"
BASE_FILE = "gradus_base.json"
"""Beside an adapter: the digest of the model that it was trained beside."""
_MAX_MANIFEST_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one file must hold."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of one version; written last, so its digest stands for all of them."""

    version: int
    term: int
    files: dict[str, FileEntry]
    """By plain file name; nothing else may lie in the directory."""

    def encode(self) -> bytes:
        """The bytes of `manifest.json`; equal manifests have equal bytes."""
        return msgspec.json.encode(self, order="sorted")


def manifest_digest(manifest: Manifest) -> str:
    """The digest that stands for a version in messages and admin calls."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def build_manifest(version: int, term: int, entries: Mapping[str, FileEntry]) -> Manifest:
    """A manifest of the files named in `entries`."""
    for name in entries:
        _refuse_unsafe_name(name)
    return Manifest(version=version, term=term, files=dict(entries))


def verify(directory: Path, digest: str) -> Manifest:
    """The manifest of `directory`, after every byte in it was checked.

    Refuses with CorruptStateError: a manifest with another digest, a file that is missing, changed,
    not a regular file, or not listed.
    """
    raw = _read_manifest(directory)
    if not hmac.compare_digest(hashlib.sha256(raw).hexdigest(), digest):
        raise CorruptStateError(
            f"{directory / MANIFEST_NAME} does not have the digest {digest[:16]}… announced; "
            "publish the version again"
        )
    manifest = _decode(raw, directory)
    found = {entry.name for entry in directory.iterdir()} - {MANIFEST_NAME}
    if found != set(manifest.files):
        odd = sorted(found ^ set(manifest.files))
        raise CorruptStateError(f"{directory}: files {odd} are missing or not in the manifest")
    for name, entry in manifest.files.items():
        _verify_file(directory / name, entry)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory` as it stands there, without a look at the files it names."""
    return _decode(_read_manifest(directory), directory)


def file_entry(path: Path) -> FileEntry:
    """Size and SHA-256 of a regular file; refuses links and anything else."""
    digest = hashlib.sha256()
    size = 0
    with _open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(sha256=digest.hexdigest(), bytes=size)


def _read_manifest(directory: Path) -> bytes:
    path = directory / MANIFEST_NAME
    with _open_regular(path) as file:
        raw = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(raw) > _MAX_MANIFEST_BYTES:
        raise CorruptStateError(f"{path} is larger than {_MAX_MANIFEST_BYTES} bytes")
    return raw


def _decode(raw: bytes, directory: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except ValueError as error:
        raise CorruptStateError(
            f"{directory / MANIFEST_NAME} is not a manifest: {error}"
        ) from error
    for name in manifest.files:
        _refuse_unsafe_name(name)
    return manifest


def _verify_file(path: Path, expected: FileEntry) -> None:
    found = file_entry(path)
    if found != expected:
        raise CorruptStateError(
            f"{path} has {found.bytes} bytes and SHA-256 {found.sha256[:16]}…, the manifest says "
            f"{expected.bytes} and {expected.sha256[:16]}…; publish the version again"
        )


def _open_regular(path: Path) -> BinaryIO:
    try:
        # O_NONBLOCK: a named pipe put in the file's place must not block us before fstat.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptStateError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptStateError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _refuse_unsafe_name(name: str) -> None:
    if not name or name.startswith(".") or "/" in name or "\0" in name or name == MANIFEST_NAME:
        raise CorruptStateError(f"manifest: {name!r} is not a plain file name")

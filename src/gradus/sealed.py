"""A sealed folder: files that appear together under one name, and prove that they are unchanged.

    stage    write the files into a hidden folder beside the final name
    seal     make them durable, with a manifest of their sizes and digests, then rename the folder
    verify   compare every byte with the manifest, which carries a digest of itself

A file is digested in blocks, several at a time, and its digest is that of the digests of its
blocks.

What was sealed is never written again, so a crash at any moment leaves the final name absent or
whole. Checkpoints, published weights and batches on their way to the trainer are sealed; a saved
model is put in place the same way, without a manifest, since other programs read it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from gradus.errors import ConfigError, CorruptStateError, StorageError
from gradus.files import (
    DISK_ERRORS,
    UNWRITABLE_ERRORS,
    DurableFiles,
    storage_error,
    threads,
)
from gradus.heartbeat import touch_alive
from gradus.log import get_logger

FORMAT = 6
"""Raised when an older gradus could not read what this one seals."""

MANIFEST_NAME = "manifest.json"

Label = TypeVar("Label")
"""What the owner of a folder says of it: the step of a batch, the version of weights."""

_LOG = get_logger(__name__)
_HIDDEN = re.compile(r"\..+\.(?:tmp|deleted)-(\d+)")
_MAX_MANIFEST_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_THREADS = 8

BLOCK_BYTES = 16 << 20
"""What is digested by itself, but for the end of a file."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one file must hold."""

    sha256: str
    """Of the SHA-256 of its blocks."""
    bytes: int


Entries = Mapping[str, FileEntry]
"""By path below the folder."""


class _Manifest(msgspec.Struct, Generic[Label], frozen=True, forbid_unknown_fields=True):
    format: int
    label: Label
    files: dict[str, FileEntry]


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file `manifest.json`: a flipped bit in it is no other format, label or digest."""

    sha256: str
    manifest: msgspec.Raw


@dataclass(frozen=True)
class SealedFolder(Generic[Label]):
    """A folder with its manifest read and believed, but none of the files that it names."""

    path: Path
    label: Label
    files: Entries
    digest: str
    """Of label and files, so of every byte of the folder."""

    def verify(self) -> None:
        """CorruptStateError for a file that is missing, changed, not listed or not regular."""
        try:
            found = file_entries(self.path)
        except FileNotFoundError as error:
            raise CorruptStateError(f"{error.filename} vanished while it was read") from error
        if found.keys() != self.files.keys():
            odd = sorted(found.keys() ^ self.files.keys())
            raise CorruptStateError(f"{self.path}: files {odd} are missing or not in the manifest")
        for name, entry in found.items():
            self._compare(name, entry)

    def read(self, name: str) -> bytes:
        """The content of one file, verified."""
        # One byte more than there should be, so that a longer file shows and memory is bounded.
        content = _read_regular(self.path / name, self.files[name].bytes + 1)
        self._compare(name, content_entry(content))
        return content

    def _compare(self, name: str, found: FileEntry) -> None:
        expected = self.files[name]
        if found != expected:
            raise CorruptStateError(
                f"{self.path / name} has {found.bytes} bytes and SHA-256 {found.sha256[:16]}…, the "
                f"manifest says {expected.bytes} and SHA-256 {expected.sha256[:16]}…"
            )


class BlockDigest(NamedTuple):
    """Of at most BLOCK_BYTES of a file."""

    sha256: bytes
    bytes: int


def staging_path(target: Path, term: int) -> Path:
    return target.with_name(f".{target.name}.tmp-{term}")


@contextmanager
def stage(target: Path, files: DurableFiles, *, term: int = 0) -> Iterator[Path]:
    """An empty folder in which to put `target` together; it goes when the disk refuses a file."""
    staging = staging_path(target, term)
    files.delete(staging)
    try:
        files.make_folder(staging)
        yield staging
    except StorageError:
        sweep(staging, files)
        raise
    except OSError as error:
        if error.errno not in DISK_ERRORS | UNWRITABLE_ERRORS:
            raise
        sweep(staging, files)
        raise storage_error(error, staging) from error


def seal(
    staging: Path,
    target: Path,
    label: Label,
    *,
    entries: Entries | None = None,
    before_rename: Callable[[], None] = lambda: None,
    files: DurableFiles,
) -> SealedFolder[Label]:
    """Turn what was staged into `target`, whole or not at all.

    `entries` spares reading the files when the caller knows them; `before_rename` may refuse at the
    last moment.
    """
    # Left by an attempt that failed after it.
    (staging / MANIFEST_NAME).unlink(missing_ok=True)
    entries = file_entries(staging) if entries is None else entries
    body = _encode(label, entries)
    digest = hashlib.sha256(body).hexdigest()
    manifest = msgspec.json.encode(_Signed(digest, msgspec.Raw(body)))
    files.stage(staging / MANIFEST_NAME, manifest)
    put_in_place(staging, target, files, before_rename=before_rename)
    return SealedFolder(target, label, entries, digest)


def put_in_place(
    staging: Path,
    target: Path,
    files: DurableFiles,
    *,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Make everything in `staging` durable and give it the name `target`."""
    # In threads: the disk joins syncs that wait at the same time.
    list(threads(_THREADS).map(files.sync, list(_regular_files(staging))))
    for folder in sorted((p for p in staging.rglob("*") if p.is_dir()), reverse=True):
        files.sync(folder)
    files.sync(staging)
    before_rename()
    files.rename(staging, target)
    files.sync(target.parent)


def open_sealed(folder: Path, label: type[Label]) -> SealedFolder[Label]:
    """The manifest of a sealed folder.

    CorruptStateError when it is damaged, ConfigError for a format that this version does not read.
    """
    path = folder / MANIFEST_NAME
    raw = _read_regular(path, _MAX_MANIFEST_BYTES)
    try:
        signed = msgspec.json.decode(raw, type=_Signed)
        body = bytes(signed.manifest)
        if hashlib.sha256(body).hexdigest() != signed.sha256:
            raise CorruptStateError(f"{path} was changed after it was written")
        written_format = msgspec.json.decode(body)["format"]
        if written_format != FORMAT:
            raise ConfigError(
                f"{folder} has format {written_format}, this version of gradus reads format "
                f"{FORMAT}; use the version that wrote it"
            )
        manifest: _Manifest[Label] = msgspec.json.decode(body, type=_Manifest[label])  # type: ignore[valid-type]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStateError(f"{path} is not a manifest: {error}") from error
    return SealedFolder(folder, manifest.label, manifest.files, signed.sha256)


def discard(folder: Path, term: int, files: DurableFiles) -> None:
    """Delete a sealed folder. Its name goes first: half a folder would look like a damaged one."""
    hidden = folder.with_name(f".{folder.name}.deleted-{term}")
    files.rename(folder, hidden)
    sweep(hidden, files)


def discard_unfinished(parent: Path, files: DurableFiles, *, last_term: int) -> None:
    """Delete what owners up to `last_term` staged, or began to delete, and never finished."""
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        match = _HIDDEN.fullmatch(path.name)
        if match and int(match[1]) <= last_term and not path.is_symlink():
            sweep(path, files)


def sweep(hidden: Path, files: DurableFiles) -> None:
    """Delete a hidden folder; one that cannot be deleted is a warning."""
    try:
        files.delete(hidden)
    except StorageError as error:
        _LOG.warning("%s stays on disk: %s", hidden.name, error)


def contents_digest(label: Any, entries: Entries) -> str:
    return hashlib.sha256(_encode(label, entries)).hexdigest()


def content_entry(content: bytes) -> FileEntry:
    view = memoryview(content)
    starts = range(0, len(view), BLOCK_BYTES)
    return entry_of([digest_block([view[start : start + BLOCK_BYTES]]) for start in starts])


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """The entry of every file below `folder`, its manifest aside; each is read once."""
    paths = [path for path in _regular_files(folder) if path != folder / MANIFEST_NAME]
    entries = [file_entry(path) for path in paths]
    return {str(p.relative_to(folder)): it for p, it in zip(paths, entries, strict=True)}


def file_entry(path: Path) -> FileEntry:
    """The entry of a regular file; CorruptStateError for links and anything else."""
    descriptor = _open_regular(path)
    try:
        starts = range(0, os.fstat(descriptor).st_size, BLOCK_BYTES)
        return entry_of(
            in_threads(lambda start: digest_block(_read_block(descriptor, start)), starts)
        )
    finally:
        os.close(descriptor)


def digest_block(pieces: Iterable[bytes | memoryview]) -> BlockDigest:
    touch_alive()  # a launcher reads whole checkpoints
    sha256, num_bytes = hashlib.sha256(), 0
    for piece in pieces:
        sha256.update(piece)
        num_bytes += len(piece)
    return BlockDigest(sha256.digest(), num_bytes)


def entry_of(blocks: Sequence[BlockDigest]) -> FileEntry:
    return FileEntry(
        sha256=hashlib.sha256(b"".join(block.sha256 for block in blocks)).hexdigest(),
        bytes=sum(block.bytes for block in blocks),
    )


def in_threads(action: Callable[[int], BlockDigest], starts: Sequence[int]) -> list[BlockDigest]:
    """What `action` makes of every block, on at most half of the cores: a step may run beside."""
    num_threads = min(_THREADS, len(starts), (os.cpu_count() or 1) // 2)
    if num_threads < 2:
        return [action(start) for start in starts]
    return list(threads(num_threads).map(action, starts))


def _read_block(descriptor: int, start: int) -> Iterator[bytes]:
    end = start + BLOCK_BYTES
    while piece := os.pread(descriptor, min(_PIECE_BYTES, end - start), start):
        start += len(piece)
        yield piece


def _encode(label: Any, entries: Entries) -> bytes:
    """The manifest; equal folders have equal bytes."""
    return msgspec.json.encode(_Manifest(FORMAT, label, dict(entries)), order="sorted")


def _regular_files(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, in one order; refuses links, pipes and devices."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield path
        elif not stat.S_ISDIR(mode):
            raise CorruptStateError(
                f"{path} is not a regular file; a sealed folder holds no others"
            )


def _read_regular(path: Path, max_bytes: int) -> bytes:
    with os.fdopen(_open_regular(path), "rb") as file:
        return file.read(max_bytes)


def _open_regular(path: Path) -> int:
    try:
        # O_NONBLOCK: a named pipe put in the file's place must not block us before fstat.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptStateError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptStateError(f"{path} is not a regular file")
    return descriptor

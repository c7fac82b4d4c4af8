"""Versions as directories: safetensors written beside, checksummed, then renamed into place."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gradus.errors import CorruptStateError, RunDirectoryError
from gradus.files import DISK_ERRORS, file_digest, storage_error, write_when_there_is_room
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.weights.base import Published
from gradus.weights.manifest import (
    MANIFEST_NAME,
    build_manifest,
    file_entry,
    manifest_digest,
    read_manifest,
)

SHARD_BYTES = 4 << 30
"""Most bytes of tensors in one file; more are split over several files with an index."""

Write = Callable[[Path, Iterable[tuple[str, Tensor]]], list[Path]]
"""Writes a stream of tensors into a directory and gives the files."""

FULL_DISK_SECONDS = 480.0
"""How long each file waits for room; less than the other ranks wait for rank 0."""
FULL_DISK_PAUSE_SECONDS = 5.0
_OS_ERROR = re.compile(r"os error (\d+)")
_VERSION_NAME = re.compile(r"version_(\d{8})")
_TEMPORARY_NAME = re.compile(r"\..+\.tmp-(\d+)")


class FilesystemWeights:
    """Owns `<run_dir>/weights`: publishes versions and keeps the newest few.

    >>> weights = FilesystemWeights(run_dir, term=1, extra_files={})  # doctest: +SKIP
    >>> weights.publish(1, [("w", torch.zeros(2))]).directory.name  # doctest: +SKIP
    'version_00000001'
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        term: int,
        extra_files: Mapping[str, bytes],
        keep_published: int | None = 2,
        write: Write | None = None,
    ) -> None:
        """`write` puts the tensors of a version into its directory; `write_tensors` by default.

        With `keep_published` None somebody else deletes versions, also those of older terms.
        """
        self._run_dir = run_dir
        self._term = term
        self._extra_files = dict(extra_files)
        self._keep_published = keep_published
        self._write = write or write_tensors
        run_dir.weights.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(run_dir.weights, term)
        if keep_published is not None:
            _delete_void(run_dir.weights, term)

    def wait_for_room(self) -> None:
        """A disk that is full is waited for while a version is written."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Write `version` and forget old ones.

        FencedError when a newer owner took the run, StorageError when the disk does not take it.
        """
        check_term(self._run_dir, self._term)
        target = self._run_dir.version(version)
        temporary = target.with_name(f".{target.name}.tmp-{self._term}")
        shutil.rmtree(temporary, ignore_errors=True)
        with _disk_errors_named(temporary):
            temporary.mkdir()
            files = self._write(temporary, tensors)
            digest = _seal_version(temporary, version, self._term, files, self._extra_files)
        check_term(self._run_dir, self._term)
        _put_in_place(temporary, target)
        self._forget_old(version)
        return Published(version=version, directory=target, digest=digest)

    def drain(self) -> None:
        """Files need nobody to send them."""

    def close(self) -> None:
        """Nothing is held open."""

    def _forget_old(self, newest: int) -> None:
        if self._keep_published is None:
            return
        for path in self._run_dir.weights.iterdir():
            match = _VERSION_NAME.fullmatch(path.name)
            is_old = match is not None and int(match[1]) <= newest - self._keep_published
            if is_old and not path.is_symlink():
                shutil.rmtree(path)


def published_versions(run_dir: RunDirectory) -> list[Published]:
    """The versions that lie in `run_dir.weights`, complete, in order."""
    if not run_dir.weights.is_dir():
        return []
    return [
        Published(int(match[1]), path, file_digest(path / MANIFEST_NAME))
        for path in sorted(run_dir.weights.iterdir())
        if (match := _VERSION_NAME.fullmatch(path.name)) and not path.is_symlink()
    ]


@contextmanager
def _disk_errors_named(folder: Path) -> Iterator[None]:
    """A disk that is full or read-only becomes a StorageError, and `folder` is deleted."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        told = storage_error(error, folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise told from error


def write_patiently(path: Path, write: Callable[[], None]) -> None:
    """Let `write` make the file `path`; a full disk holds the run until somebody makes room."""
    write_when_there_is_room(
        write, path, seconds=FULL_DISK_SECONDS, pause_seconds=FULL_DISK_PAUSE_SECONDS
    )


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _save_shard(shard: dict[str, Tensor], path: Path) -> None:
    """OSError with its number; safetensors writes in Rust, which says it in words alone."""
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from error


def write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    stem: str = "model",
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the stream as `<stem>.safetensors`, or as shards with their index; gives the files."""
    shards: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for shard in _in_shards(tensors, shard_bytes):
        path = directory / f"shard-{len(shards):05d}"
        write_patiently(path, partial(_save_shard, shard, path))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        shards.append((path, list(shard)))
    if len(shards) == 1:
        return [shards[0][0].rename(directory / f"{stem}.safetensors")]
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        file = path.rename(directory / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors")
        files.append(file)
        weight_map |= dict.fromkeys(names, file.name)
    index = directory / f"{stem}.safetensors.index.json"
    content = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    write_patiently(index, partial(_write_bytes, index, content.encode()))
    return [*files, index]


def _in_shards(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        if shard and filled + tensor.nbytes > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
    yield shard


def _seal_version(
    directory: Path, version: int, term: int, files: list[Path], extra_files: Mapping[str, bytes]
) -> str:
    """Complete `directory`, durable to the last byte; gives the digest of its manifest."""
    for name, content in extra_files.items():
        path = directory / name
        write_patiently(path, partial(_write_bytes, path, content))
        files.append(path)
    manifest = build_manifest(version, term, {path.name: file_entry(path) for path in files})
    seal = directory / MANIFEST_NAME
    write_patiently(seal, partial(_write_bytes, seal, manifest.encode()))
    # In threads: the disk joins syncs that wait at the same time.
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(_sync, [*files, seal]))
    _sync(directory)
    return manifest_digest(manifest)


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.exists():
        raise RunDirectoryError(
            f"{target} exists already; a version is published once. Resume under a new term or "
            "delete the run's weights"
        )
    temporary.rename(target)
    _sync(target.parent)


def _delete_abandoned(weights: Path, term: int) -> None:
    """Delete what an owner with an older or the same term began and did not finish."""
    for path in weights.iterdir():
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match and int(match[1]) <= term and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _delete_void(weights: Path, term: int) -> None:
    """Delete what older terms published: a resumed run starts again from a checkpoint.

    No engine of this term serves those versions, and this term will publish others of the same
    numbers.
    """
    for path in weights.iterdir():
        if not _VERSION_NAME.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            is_void = read_manifest(path).term < term
        except CorruptStateError:
            is_void = True
        if is_void:
            shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Versions as sealed folders of safetensors."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gradus.errors import ConfigError, CorruptStateError, RunDirectoryError
from gradus.files import DurableFiles, PatientFiles
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.sealed import discard, discard_unfinished, open_sealed, seal, stage
from gradus.weights.published import Published, VersionLabel

SHARD_BYTES = 4 << 30
"""Most bytes of tensors in one file; more are split over several files with an index."""

Write = Callable[[Path, Iterable[tuple[str, Tensor]], DurableFiles], None]
"""Writes a stream of tensors into a folder that is sealed later."""

_OS_ERROR = re.compile(r"os error (\d+)")
_VERSION_NAME = re.compile(r"version_(\d{8})")


class FilesystemWeights:
    """Owns `<run_dir>/weights`: publishes versions and keeps the newest few.

    >>> weights = FilesystemWeights(run_dir, term=1, extra_files={})  # doctest: +SKIP
    >>> weights.publish_version(1, [("w", torch.zeros(2))]).directory.name  # doctest: +SKIP
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
        """`write` puts the tensors of a version into its folder; `write_tensors` by default.

        With `keep_published` None the caller deletes versions, also those of older terms.
        """
        self._run_dir = run_dir
        self._term = term
        self._extra_files = dict(extra_files)
        self._keep_published = keep_published
        self._write = write or write_tensors
        self._files = PatientFiles()
        self._files.make_folder(run_dir.weights)
        discard_unfinished(run_dir.weights, self._files, last_term=term)
        if keep_published is not None:
            self._delete_void()

    def wait_for_room(self) -> None:
        """Returns at once; writing a version waits for room on a full disk."""

    def publish_version(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Write `version` and forget old ones.

        FencedError when a newer owner took the run, StorageError when the disk does not take it.
        """
        check_term(self._run_dir, self._term)
        target = self._run_dir.version(version)
        if target.exists():
            raise RunDirectoryError(
                f"{target} exists already; a version is published once. Resume under a new term or "
                "delete the run's weights"
            )
        with stage(target, self._files, term=self._term) as staging:
            self._write(staging, tensors, self._files)
            for name, content in self._extra_files.items():
                self._files.stage(staging / name, content)
            check = partial(check_term, self._run_dir, self._term)
            label = VersionLabel(version, self._term)
            sealed = seal(staging, target, label, before_rename=check, files=self._files)
        self._forget_old(version)
        return Published(version, target, sealed.digest)

    def drain(self) -> None:
        """A version is complete once it is published."""

    def close(self) -> None:
        """Nothing is held open."""

    def _forget_old(self, newest: int) -> None:
        if self._keep_published is None:
            return
        for version, path in _versions(self._run_dir):
            if version <= newest - self._keep_published:
                discard(path, self._term, self._files)

    def _delete_void(self) -> None:
        """Delete what older terms published: a resumed run starts again from a checkpoint.

        No engine of this term serves those versions, and this term will publish others of the same
        numbers.
        """
        for _, path in _versions(self._run_dir):
            try:
                is_void = open_sealed(path, VersionLabel).label.term < self._term
            except (ConfigError, CorruptStateError):
                is_void = True
            if is_void:
                discard(path, self._term, self._files)


def published_versions(run_dir: RunDirectory) -> list[Published]:
    """The complete versions in `run_dir.weights`, in order."""
    return [
        Published(version, path, open_sealed(path, VersionLabel).digest)
        for version, path in _versions(run_dir)
    ]


def _versions(run_dir: RunDirectory) -> list[tuple[int, Path]]:
    if not run_dir.weights.is_dir():
        return []
    return [
        (int(match[1]), path)
        for path in sorted(run_dir.weights.iterdir())
        if (match := _VERSION_NAME.fullmatch(path.name)) and not path.is_symlink()
    ]


def write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    files: DurableFiles,
    *,
    stem: str = "model",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the stream as `<stem>.safetensors`, or as shards with their index."""
    shards: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for shard in _in_shards(tensors, shard_bytes):
        path = directory / f"shard-{len(shards):05d}"
        num_bytes = sum(tensor.nbytes for tensor in shard.values())
        files.stage_by(path, partial(_save_shard, shard), num_bytes=num_bytes)
        total_bytes += num_bytes
        shards.append((path, list(shard)))
    if len(shards) == 1:
        shards[0][0].rename(directory / f"{stem}.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        file = path.rename(directory / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors")
        weight_map |= dict.fromkeys(names, file.name)
    index = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    files.stage(directory / f"{stem}.safetensors.index.json", index.encode())


def _save_shard(shard: dict[str, Tensor], path: Path) -> None:
    """Raises OSError with its number, which safetensors, written in Rust, only gives in words."""
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from error


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

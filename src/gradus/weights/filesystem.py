"""Versions as sealed folders of safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from gradus.errors import ConfigError, CorruptStateError, RunDirectoryError
from gradus.files import DurableFiles, PatientFiles
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.sealed import (
    Entries,
    content_entry,
    discard,
    discard_unfinished,
    open_sealed,
    seal,
    stage,
)
from gradus.weights.published import Published, VersionLabel
from gradus.weights.tensor_files import write_tensors

Write = Callable[[Path, Iterable[tuple[str, Tensor]], DurableFiles], Entries]
"""Writes a stream of tensors into a folder that is sealed later; what it wrote."""

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
            entries = dict(self._write(staging, tensors, self._files))
            for name, content in self._extra_files.items():
                self._files.stage(staging / name, content)
                entries[name] = content_entry(content)
            sealed = seal(
                staging,
                target,
                VersionLabel(version, self._term),
                entries=entries,
                before_rename=partial(check_term, self._run_dir, self._term),
                files=self._files,
            )
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

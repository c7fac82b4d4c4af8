"""Versions as sealed folders of safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from gradus.errors import ConfigError, CorruptStateError, RunDirectoryError
from gradus.files import DurableFiles, PatientFiles
from gradus.log import get_logger
from gradus.run.growing_files import audit
from gradus.run.lease import check_term
from gradus.run.model_files import weights_digest
from gradus.run.paths import RunDirectory
from gradus.sealed import (
    Entries,
    SealedFolder,
    content_entry,
    contents_digest,
    discard,
    discard_unfinished,
    open_sealed,
    seal,
    stage,
    sweep,
)
from gradus.weights.published import Published, VersionLabel
from gradus.weights.tensor_files import write_tensors

Write = Callable[[Path, Iterable[tuple[str, Tensor]], DurableFiles], Entries]
"""Writes a stream of tensors into a folder that is sealed later; what it wrote."""

_LOG = get_logger(__name__)
_VERSION_NAME = re.compile(r"version_(\d{8})")


class FilesystemWeights:
    """Owns `<run_dir>/weights`: publishes versions and keeps the newest few."""

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        term: int,
        extra_files: Mapping[str, bytes],
        keep_published: int | None = 2,
        write: Write | None = None,
        is_exact: bool = True,
    ) -> None:
        """`write` puts the tensors of a version into its folder; `write_tensors` by default.

        With `keep_published` None the caller deletes versions, also those of older terms. With
        `is_exact` a version that is made again must be the same to the bit.
        """
        self._run_dir = run_dir
        self._term = term
        self._extra_files = dict(extra_files)
        self._keep_published = keep_published
        self._write = write or write_tensors
        self._is_exact = is_exact
        self._files = PatientFiles()
        self._files.make_folder(run_dir.weights)
        discard_unfinished(run_dir.weights, self._files, last_term=term)
        if keep_published is not None:
            self._delete_void()
        self.newest = max((version for version, _ in _versions(run_dir)), default=0)
        """That an earlier process of this term published; 0 for none."""

    def wait_for_room(self) -> None:
        """Returns at once; writing a version waits for room on a full disk."""

    def publish_version(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Write `version` and forget old ones; one that this term published stays as it was.

        FencedError when a newer owner took the run, StorageError when the disk does not take it,
        RunDirectoryError for a version that exists with other content.
        """
        check_term(self._run_dir, self._term)
        target = self._run_dir.version(version)
        known = open_sealed(target, VersionLabel) if target.exists() else None
        if known is not None and known.label.term != self._term:
            raise RunDirectoryError(
                f"{target} exists already, of another term; delete the run's weights"
            )
        with stage(target, self._files, term=self._term) as staging:
            entries = dict(self._write(staging, tensors, self._files))
            for name, content in self._extra_files.items():
                self._files.stage(staging / name, content)
                entries[name] = content_entry(content)
            label = VersionLabel(version, self._term)
            if known is not None:
                self._compare(known, contents_digest(label, entries))
                sweep(staging, self._files)
                return Published(version, target, known.digest)
            sealed = seal(
                staging,
                target,
                label,
                entries=entries,
                before_rename=partial(check_term, self._run_dir, self._term),
                files=self._files,
            )
        self._forget_old(version)
        served = {"version": version, "digest": sealed.digest, "weights": weights_digest(target)}
        audit(self._run_dir, "published", term=self._term, **served)
        return Published(version, target, sealed.digest)

    def _compare(self, known: SealedFolder[VersionLabel], digest: str) -> None:
        """What was made again must be what inference may serve already."""
        if digest == known.digest:
            return
        differs = (
            f"{known.path} has the digest {known.digest[:16]}…, and its steps trained again from a "
            f"checkpoint give {digest[:16]}…"
        )
        if self._is_exact:
            raise RunDirectoryError(f"{differs}; trainer.deterministic promises the same bits")
        _LOG.warning("%s; it stays, since episodes may be played with it", differs)

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

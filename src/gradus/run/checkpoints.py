"""Checkpoints of a whole run: staged in a hidden folder, sealed by digests, committed by a rename.

Every role writes its part into `.step_N.tmp-<term>/<part>/`; then one of them commits all parts
together. Nothing is ever written into a committed folder, so that a crash at any moment leaves the
committed ones as they were. The manifest seals itself and names every file with size and SHA-256;
it is checked before anything is read. Files are JSON, msgpack and safetensors: no code can run.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gradus.errors import ConfigError, CorruptStateError, ProtocolError, StorageError
from gradus.files import DurableFiles, file_digest
from gradus.log import get_logger
from gradus.run.lease import check_term, read_marker
from gradus.run.paths import RunDirectory

logger = get_logger(__name__)

FORMAT = 3
"""Raised when an older gradus could not read what this one writes."""

MANIFEST_NAME = "manifest.json"
MIN_KEPT = 2
"""Newest verified checkpoints that are never deleted."""

_COMMITTED = re.compile(r"step_(\d{8})(?:\.term_(\d{8}))?")
_HIDDEN = re.compile(r"\.step_\d{8}(?:\.term_\d{8})?\.(?:tmp|deleted)-(\d+)")
_MAX_MANIFEST_BYTES = 16 << 20
_HASHING_THREADS = 4
_MAX_LOOKS = 10


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one file must hold."""

    sha256: str
    bytes: int


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that lies in a committed checkpoint."""

    format: int
    run_id: str
    step: int
    """Updates that the weights contain, which is the policy version."""
    term: int
    """Term of the lease under which it was committed."""
    parts: list[str]
    files: dict[str, FileEntry]
    """By path below the checkpoint's folder; nothing else may lie there."""


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file `manifest.json`: a flipped bit in it is no other format, step or digest."""

    sha256: str
    manifest: msgspec.Raw


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of which every byte was checked."""

    folder: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Updates that the weights contain; training goes on with this step."""
        return self.manifest.step

    def part(self, name: str) -> Path:
        """The folder of one part; CorruptStateError when the checkpoint was made without it."""
        if name not in self.manifest.parts:
            raise CorruptStateError(
                f"{self.folder} has no part {name!r}, only {self.manifest.parts}; "
                "it belongs to another kind of run"
            )
        return self.folder / name


@dataclass(frozen=True, order=True)
class _Committed:
    """A committed folder; of two with one step, the later term is the newer."""

    step: int
    term: int
    folder: Path


class CheckpointStore:
    """Owns `<run>/checkpoints`: the only code that names, commits, finds and deletes checkpoints.

    >>> checkpoints = CheckpointStore(run_dir, term=1)  # doctest: +SKIP
    >>> (checkpoints.staging(10) / "trainer").mkdir()  # doctest: +SKIP
    >>> checkpoints.commit(10, ["trainer"]).step  # doctest: +SKIP
    10
    """

    def __init__(self, run_dir: RunDirectory, term: int, files: DurableFiles | None = None) -> None:
        self.run_dir = run_dir
        self._root = run_dir.checkpoints
        self._term = term
        self._files = files or DurableFiles()
        self._verified: set[Path] = set()

    def staging(self, step: int) -> Path:
        """The folder in which checkpoint `step` is put together; it exists afterwards."""
        folder = self._root / f".step_{step:08d}.tmp-{self._term}"
        self._files.make_folder(folder)
        return folder

    def commit(self, step: int, parts: Sequence[str]) -> Checkpoint:
        """Turn what was staged into checkpoint `step`, whole or not at all.

        Refuses a missing part (ProtocolError), a newer owner of the run (FencedError) and a disk
        that fails (StorageError); the committed checkpoints are then as they were. A step that was
        committed under an older term stays until `prune` sees both.
        """
        check_term(self.run_dir, self._term)
        staging = self.staging(step)
        self._refuse_incomplete(staging, parts)
        paths = list(_regular_files(staging))
        for path in [*paths, *(p for p in staging.rglob("*") if p.is_dir())]:
            self._files.sync(path)
        manifest = CheckpointManifest(
            format=FORMAT,
            run_id=self._run_id(),
            step=step,
            term=self._term,
            parts=list(parts),
            files=_entries(staging, paths),
        )
        self._files.write(staging / MANIFEST_NAME, _seal(manifest))
        self._files.sync(staging)
        check_term(self.run_dir, self._term)
        target = self._free_name(step)
        self._files.rename(staging, target)
        self._files.sync(self._root)
        self._verified.add(target)
        return Checkpoint(target, manifest)

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint that verifies; None when there is none at all.

        One that does not verify is reported and the one before is used; when a run that is alive
        deletes one meanwhile, the newest is looked for again. CorruptStateError when there are some
        and none verifies; ConfigError when a newer gradus wrote one.
        """
        for _ in range(_MAX_LOOKS):
            found = self._committed()
            for committed in found:
                try:
                    return self._verify(committed)
                except CorruptStateError as error:
                    if not committed.folder.exists():
                        break
                    logger.error("checkpoint %d is not used: %s", committed.step, error)
            else:
                self._refuse_damaged(found)
                return None
        raise StorageError(
            f"{self._root}: each of {_MAX_LOOKS} checkpoints was deleted while it was read; keep "
            "more of them (checkpoint.keep_last)"
        )

    def _refuse_damaged(self, found: Sequence[_Committed]) -> None:
        if found:
            raise CorruptStateError(
                f"none of the {len(found)} checkpoints in {self._root} is whole; restore one, or "
                "start a run under another name"
            )

    def load(self, step: int) -> Checkpoint:
        """Checkpoint `step`, verified; ConfigError when there is none of that step."""
        return self._verify(self._find(step))

    def load_folder(self, folder: Path) -> Checkpoint:
        """The checkpoint in a committed folder, verified; ConfigError when it is none of ours."""
        for committed in self._committed():
            if committed.folder == folder:
                return self._verify(committed)
        raise ConfigError(f"{folder} is no committed checkpoint of {self.run_dir.root}")

    def locate(self, step: int) -> Checkpoint:
        """Checkpoint `step` unchecked, for a rank beside one that has loaded it."""
        folder = self._find(step).folder
        return Checkpoint(folder, read_manifest(folder))

    def folders(self) -> list[tuple[int, Path]]:
        """Step and folder of every committed checkpoint, oldest first, none of them checked."""
        return [(found.step, found.folder) for found in reversed(self._committed())]

    def prune(self, keep_last: int, keep_interval_steps: int | None = None) -> None:
        """Delete old checkpoints; never one of the newest two that verify.

        Kept are the newest `keep_last` that verify, and every multiple of `keep_interval_steps`.
        A deletion that fails is a warning.
        """
        kept: set[int] = set()
        for committed in self._committed():
            is_superseded = committed.step in kept
            if len(kept) < max(MIN_KEPT, keep_last) and not is_superseded:
                if self._is_whole(committed):
                    kept.add(committed.step)
                continue
            is_landmark = keep_interval_steps and committed.step % keep_interval_steps == 0
            if is_landmark and not is_superseded:
                kept.add(committed.step)
                continue
            self._delete(committed.folder)

    def newest_step(self) -> int | None:
        """Step of the newest committed checkpoint, which nobody verified here; None without one."""
        return max((committed.step for committed in self._committed()), default=None)

    def discard(self, step: int) -> None:
        """Delete what was staged of checkpoint `step`, after a part of it failed."""
        self._delete_hidden(self._root / f".step_{step:08d}.tmp-{self._term}")

    def discard_stale(self) -> None:
        """Delete what older terms staged or began to delete, and never finished."""
        if not self._root.is_dir():
            return
        for path in self._root.iterdir():
            match = _HIDDEN.fullmatch(path.name)
            if match and int(match[1]) < self._term and not path.is_symlink():
                self._delete_hidden(path)

    def _committed(self) -> list[_Committed]:
        """Every committed folder, newest first, checked or not."""
        if not self._root.is_dir():
            return []
        # The listing first: a network disk may remember the absence of a single name.
        names = sorted(path.name for path in self._root.iterdir() if not path.is_symlink())
        matches = [match for name in names if (match := _COMMITTED.fullmatch(name))]
        found = [_Committed(int(m[1]), int(m[2] or 0), self._root / m[0]) for m in matches]
        return sorted(found, reverse=True)

    def _find(self, step: int) -> _Committed:
        found = self._committed()
        for committed in found:
            if committed.step == step:
                return committed
        steps = sorted({committed.step for committed in found})
        raise ConfigError(f"{self._root} has no checkpoint of step {step}; there are {steps}")

    def _verify(self, committed: _Committed) -> Checkpoint:
        manifest = verify_checkpoint(committed.folder)
        if manifest.step != committed.step or manifest.run_id != self._run_id():
            raise CorruptStateError(
                f"{committed.folder} holds step {manifest.step} of run {manifest.run_id!r}; "
                "it was copied or renamed"
            )
        self._verified.add(committed.folder)
        return Checkpoint(committed.folder, manifest)

    def _is_whole(self, committed: _Committed) -> bool:
        """Whether a checkpoint verifies; each is read once in the life of this object."""
        if committed.folder in self._verified:
            return True
        try:
            self._verify(committed)
        except (CorruptStateError, ConfigError) as error:
            logger.warning("checkpoint %d does not count as kept: %s", committed.step, error)
            return False
        return True

    def _refuse_incomplete(self, staging: Path, parts: Sequence[str]) -> None:
        found = {path.name for path in staging.iterdir()} - {MANIFEST_NAME}
        if found != set(parts):
            odd = sorted(found ^ set(parts))
            raise ProtocolError(
                f"{staging} cannot be committed: parts {odd} are missing or unknown"
            )
        # Left by a commit that failed behind it.
        (staging / MANIFEST_NAME).unlink(missing_ok=True)

    def _free_name(self, step: int) -> Path:
        """`step_N`, or with the term behind it when an older term committed that step."""
        for name in (f"step_{step:08d}", f"step_{step:08d}.term_{self._term:08d}"):
            if not (self._root / name).exists():
                return self._root / name
        raise StorageError(f"checkpoint {step} was committed already under term {self._term}")

    def _delete(self, folder: Path) -> None:
        """Take the name away first: half a checkpoint must not look like a damaged one."""
        hidden = folder.with_name(f".{folder.name}.deleted-{self._term}")
        try:
            self._files.rename(folder, hidden)
        except StorageError as error:
            logger.warning("old checkpoint stays: %s", error)
            return
        self._verified.discard(folder)
        self._delete_hidden(hidden)

    def _delete_hidden(self, folder: Path) -> None:
        try:
            self._files.delete(folder)
        except StorageError as error:
            logger.warning("%s stays on disk: %s", folder.name, error)

    def _run_id(self) -> str:
        """The run's own name, also after its folder was renamed."""
        marker = read_marker(self.run_dir)
        return self.run_dir.root.name if marker is None else marker.run_id


def verify_checkpoint(folder: Path) -> CheckpointManifest:
    """The manifest of a committed checkpoint, after every byte below `folder` was checked.

    Refuses with CorruptStateError a file that is missing, changed, not listed or no regular file,
    and with ConfigError a format that this version does not read.
    """
    manifest = read_manifest(folder)
    found = {str(path.relative_to(folder)) for path in _regular_files(folder)} - {MANIFEST_NAME}
    if found != set(manifest.files):
        odd = sorted(found ^ set(manifest.files))
        raise CorruptStateError(f"{folder}: files {odd} are missing or not in the manifest")
    try:
        entries = _entries(folder, [folder / name for name in sorted(manifest.files)])
    except FileNotFoundError as error:
        raise CorruptStateError(f"{error.filename} vanished while it was read") from error
    for name, entry in entries.items():
        expected = manifest.files[name]
        if entry != expected:
            raise CorruptStateError(
                f"{folder / name} has {entry.bytes} bytes and SHA-256 {entry.sha256[:16]}…, the "
                f"manifest says {expected.bytes} and {expected.sha256[:16]}…"
            )
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest alone, with its own seal checked, but none of the files that it names."""
    path = folder / MANIFEST_NAME
    raw = _read_small(path)
    try:
        sealed = msgspec.json.decode(raw, type=_Sealed)
        body = bytes(sealed.manifest)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise CorruptStateError(f"{path} was changed after it was written")
        written_format = msgspec.json.decode(body)["format"]
        if written_format != FORMAT:
            raise ConfigError(
                f"{folder} has checkpoint format {written_format}, this version of gradus reads "
                f"format {FORMAT}; use the version that wrote it"
            )
        return msgspec.json.decode(body, type=CheckpointManifest)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStateError(f"{path} is not a manifest: {error}") from error


def _seal(manifest: CheckpointManifest) -> bytes:
    body = msgspec.json.encode(manifest, order="sorted")
    return msgspec.json.encode(_Sealed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def _entries(folder: Path, paths: Sequence[Path]) -> dict[str, FileEntry]:
    """Size and digest of each file, by path below `folder`."""
    with ThreadPoolExecutor(max_workers=_HASHING_THREADS) as pool:
        digests = list(pool.map(file_digest, paths))
    return {
        str(path.relative_to(folder)): FileEntry(sha256=digest, bytes=path.stat().st_size)
        for path, digest in zip(paths, digests, strict=True)
    }


def _regular_files(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, in one order; refuses links, pipes and devices."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield path
        elif not stat.S_ISDIR(mode):
            raise CorruptStateError(f"{path} is no regular file; a checkpoint holds no others")


def _read_small(path: Path) -> bytes:
    """A manifest's bytes; it must be a regular file of a sensible size."""
    try:
        # O_NONBLOCK: a named pipe put in the file's place must not block us before fstat.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptStateError(f"cannot read {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_MANIFEST_BYTES:
            raise CorruptStateError(f"{path} is not a manifest")
        return file.read()

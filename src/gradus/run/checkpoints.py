"""Checkpoints of a whole run: each role writes its part, and one of them seals all parts together.

Files are JSON, msgpack and safetensors: no code can run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gradus.errors import ConfigError, CorruptStateError, ProtocolError, StorageError
from gradus.files import DurableFiles
from gradus.log import get_logger
from gradus.run.lease import check_term, read_marker
from gradus.run.paths import RunDirectory
from gradus.sealed import (
    MANIFEST_NAME,
    discard,
    discard_unfinished,
    open_sealed,
    seal,
    staging_path,
    sweep,
)

logger = get_logger(__name__)

MIN_KEPT = 2
"""Newest verified checkpoints that are never deleted."""

_COMMITTED = re.compile(r"step_(\d{8})(?:\.term_(\d{8}))?")
_DAMAGED = ".damaged"
_MAX_LOOKS = 10


class CheckpointLabel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a committed checkpoint is."""

    run_id: str
    step: int
    """Updates that the weights contain, which is the policy version."""
    term: int
    """Term of the lease under which it was committed."""
    parts: list[str]


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of which every byte was checked."""

    folder: Path
    label: CheckpointLabel

    @property
    def step(self) -> int:
        """Updates that the weights contain; training continues with this step."""
        return self.label.step

    def part(self, name: str) -> Path:
        """The folder of one part; CorruptStateError when the checkpoint was made without it."""
        if name not in self.label.parts:
            raise CorruptStateError(
                f"{self.folder} has no part {name!r}, only {self.label.parts}; "
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
    """Owns `<run>/checkpoints`: alone names, commits, finds and deletes checkpoints."""

    def __init__(self, run_dir: RunDirectory, term: int, files: DurableFiles | None = None) -> None:
        self.run_dir = run_dir
        self._root = run_dir.checkpoints
        self._term = term
        self._files = files or DurableFiles()
        self._verified: set[Path] = set()

    def staging(self, step: int) -> Path:
        """The folder in which checkpoint `step` is put together; it exists afterwards."""
        folder = self._staging(step)
        self._files.make_folder(folder)
        return folder

    def commit(self, step: int, parts: Sequence[str]) -> Checkpoint:
        """Turn what was staged into checkpoint `step`, whole or not at all.

        Refuses a missing part (ProtocolError), a newer owner of the run (FencedError) and a disk
        that fails (StorageError); the committed checkpoints are then as they were. A step that was
        committed under an older term stays until `prune` sees both.
        """
        self._check_term()
        staging = self.staging(step)
        self._refuse_incomplete(staging, parts)
        target = self._free_name(step)
        if not self._committed():
            # A checkpoint that lasts needs every name above it to last, and the journal's.
            for above in (self.run_dir.root, self.run_dir.root.parent):
                self._files.sync(above)
        label = CheckpointLabel(self._run_id(), step, self._term, list(parts))
        seal(staging, target, label, before_rename=self._check_term, files=self._files)
        self._verified.add(target)
        return Checkpoint(target, label)

    def latest(self, *, sets_aside: bool = False) -> Checkpoint | None:
        """The newest committed checkpoint that verifies; None when there is none at all.

        One that does not verify is reported and the one before it is used. Who owns the run has
        such a one renamed (`sets_aside`), or `prune` would keep it in the place of a good one. When
        a live run deletes the one that is being read, the search starts again. CorruptStateError
        when there are some and none verifies; ConfigError when a newer gradus wrote one.
        """
        for _ in range(_MAX_LOOKS):
            found, newest = self._committed(), ""
            for number, committed in enumerate(found):
                try:
                    checkpoint = self._verify(committed)
                except CorruptStateError as error:
                    newest = newest or f"{error}"
                    if not committed.folder.exists():
                        break
                    logger.error("checkpoint %d is not used: %s", committed.step, error)
                else:
                    if sets_aside:
                        self._set_aside(found[:number])
                    return checkpoint
            else:
                if found:
                    raise CorruptStateError(
                        f"none of the {len(found)} checkpoints in {self._root} can be used, the "
                        f"newest because {newest}; restore one, or start a run under another name"
                    )
                return None
        raise StorageError(
            f"{self._root}: each of {_MAX_LOOKS} checkpoints was deleted while it was read; keep "
            "more of them (checkpoint.keep_last)"
        )

    def load(self, step: int) -> Checkpoint:
        """Checkpoint `step`, verified; ConfigError when there is none of that step."""
        return self._verify(self._find(step))

    def load_folder(self, folder: Path) -> Checkpoint:
        """The checkpoint in a committed folder, verified; ConfigError when it is none of ours."""
        for committed in self._committed():
            if committed.folder == folder:
                return self._verify(committed)
        raise ConfigError(f"{folder} is not a committed checkpoint of {self.run_dir.root}")

    def locate(self, step: int) -> Checkpoint:
        """Checkpoint `step`, not verified, for ranks that load after the one that verified it."""
        folder = self._find(step).folder
        return Checkpoint(folder, open_sealed(folder, CheckpointLabel).label)

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
        """Step of the newest committed checkpoint, not verified here; None without one."""
        return max((committed.step for committed in self._committed()), default=None)

    def discard(self, step: int) -> None:
        """Delete what was staged of checkpoint `step`, after a part of it failed."""
        sweep(self._staging(step), self._files)

    def discard_staged(self) -> None:
        """Delete what is staged in this term, which belongs to a process that is dead.

        A commit under way either has it whole, or finds that it is gone.
        """
        for staging in self._root.glob(staging_path(self._root / "step_*", self._term).name):
            self._delete(staging)

    def discard_stale(self) -> None:
        """Delete what older terms staged or began to delete, and never finished."""
        discard_unfinished(self._root, self._files, last_term=self._term - 1)

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
        sealed = open_sealed(committed.folder, CheckpointLabel)
        sealed.verify()
        label = sealed.label
        if label.step != committed.step or label.run_id != self._run_id():
            raise CorruptStateError(
                f"{committed.folder} holds step {label.step} of run {label.run_id!r}; "
                "it was copied or renamed"
            )
        self._verified.add(committed.folder)
        return Checkpoint(committed.folder, label)

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

    def _free_name(self, step: int) -> Path:
        """`step_N`, or with the term after it when an older term committed that step."""
        for name in (f"step_{step:08d}", f"step_{step:08d}.term_{self._term:08d}"):
            if not (self._root / name).exists():
                return self._root / name
        raise StorageError(f"checkpoint {step} was committed already under term {self._term}")

    def _set_aside(self, damaged: Sequence[_Committed]) -> None:
        """Keep the newest damaged one under another name, for whoever looks into it."""
        self._check_term()
        for committed in reversed(damaged):
            for earlier in self._root.glob(f"step_*{_DAMAGED}"):
                self._delete(earlier)
            target = committed.folder.with_name(committed.folder.name + _DAMAGED)
            try:
                self._files.rename(committed.folder, target)
            except StorageError as error:
                logger.warning("damaged checkpoint %d keeps its name: %s", committed.step, error)

    def _delete(self, folder: Path) -> None:
        self._verified.discard(folder)
        try:
            discard(folder, self._term, self._files)
        except StorageError as error:
            logger.warning("old checkpoint stays: %s", error)

    def _staging(self, step: int) -> Path:
        return staging_path(self._root / f"step_{step:08d}", self._term)

    def _check_term(self) -> None:
        check_term(self.run_dir, self._term)

    def _run_id(self) -> str:
        """The run's own name, also after its folder was renamed."""
        marker = read_marker(self.run_dir)
        return self.run_dir.root.name if marker is None else marker.run_id

"""Saving while training continues: copy, write in the background, agree, announce.

The copy is taken between two steps, so a checkpoint is of exactly one step. Each rank then writes
its own file without waiting for the others; at the end of a later step they agree whether all of
them succeeded. A save that fails is reported, its files are deleted, and training continues: the
next one is due soon. Only the last one is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gradus.config import CheckpointConfig
from gradus.errors import (
    ConfigError,
    CorruptStateError,
    FullDiskError,
    ProcessError,
    StorageError,
)
from gradus.files import DurableFiles, add_line, free_bytes, storage_error
from gradus.heartbeat import BEAT_SECONDS, DISK_SECONDS, Heartbeat, beat, busy, strand
from gradus.log import get_logger
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.checkpoint.training_state import (
    PART,
    StateSnapshot,
    TrainingProgress,
    TrainingState,
    read_progress,
)
from gradus.trainer.distributed import World

logger = get_logger(__name__)

LAST_SAVE_SECONDS = 600.0
"""How long the last save waits for a disk that does not take it."""
LAST_SAVE_PAUSE_SECONDS = 5.0
SPARE_FACTOR = 2
"""A disk with less room than this many checkpoints is worth a warning."""


@dataclass
class _Save:
    """A save in progress: every rank's write, then rank 0's seal."""

    step: int
    running: Future[None]
    is_sealing: bool = False


@dataclass
class CheckpointSaver(AbstractContextManager["CheckpointSaver"]):
    """Owns the saves of one rank; every method but `__exit__` is called by all ranks together."""

    state: TrainingState
    checkpoints: CheckpointStore
    config: CheckpointConfig
    max_steps: int
    announce: Callable[[int], None]
    """Tells of a checkpoint whose trainer part is complete; on rank 0, between two steps."""
    seal: Callable[[int], None] | None = None
    """Commits it first; on rank 0, in the background. None when another role does."""
    counters: Callable[[], dict[str, int]] = dict
    """What the caller wants back after a resume."""
    files: DurableFiles = field(default_factory=DurableFiles)
    clock: Callable[[], float] = time.monotonic
    newest: int = 0
    """The version that an earlier process of this term made last. What it made is not saved again,
    for the orchestrator is further; only this one, if its number says so, may not have been."""
    num_failed: int = 0
    """Saves that failed since the last one that did not."""
    _failed: tuple[int, StorageError] | None = None
    """The version of the last one that failed, and why."""
    _save: _Save | None = None
    _saved_at: float | None = None
    _saved_version: int | None = None
    _heartbeat: Heartbeat = field(default_factory=partial(strand, "checkpoint"))
    _background: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    )

    @property
    def world(self) -> World:
        return self.state.world

    def is_due(self, version: int) -> bool:
        """Tell whether `version` is saved: by its number, by time, or because the run is to stop.

        Time and requests are read by rank 0 alone.
        """
        if not self.config.is_on or version < self.newest:
            return False
        interval = self.config.interval_steps
        is_due = version == self.max_steps or (interval is not None and version % interval == 0)
        if version == self.newest:
            return is_due
        return is_due or self._first_rank_says(self._is_overdue() or self._request.exists())

    def after_step(self, version: int, *, is_due: bool) -> None:
        """Advance the save in progress, and start one when this version is due.

        A save waits for the one before. The last one, and one that a stop asked for, is complete
        when this returns.
        """
        self._look(wait_for_it=False)
        if not is_due:
            return
        self._look(wait_for_it=True)
        self._begin(version)
        is_asked_for = self._first_rank_says(self._request.exists())
        if version == self.max_steps:
            self.save_last(version)
        elif is_asked_for or not self.config.asynchronous:
            self._look(wait_for_it=True)
        if is_asked_for and self.world.is_first:
            self._request.unlink(missing_ok=True)

    def save_last(self, version: int) -> None:
        """Complete the save in progress, and save `version` if that was not done.

        No later save follows, so that one that fails is tried again until LAST_SAVE_SECONDS are
        over; then StorageError.
        """
        self._look(wait_for_it=True)
        until = self.clock() + LAST_SAVE_SECONDS
        while self.config.is_on and version != self._saved_version:
            if self._failed is not None and self._failed[0] == version:
                error = self._failed[1]
                if self._first_rank_says(self.clock() >= until):
                    raise type(error)(
                        f"the last checkpoint, of step {version}, was not saved in "
                        f"{LAST_SAVE_SECONDS:g} s: {error}; then continue with --resume"
                    ) from error
                beat(f"waits for room for checkpoint {version}")
                time.sleep(LAST_SAVE_PAUSE_SECONDS)
            self._begin(version)
            self._look(wait_for_it=True)

    def _begin(self, version: int) -> None:
        self._saved_at = self.clock()
        snapshot = self.state.snapshot(version, self.counters())
        self._save = _Save(version, self._background.submit(self._write, snapshot))

    def __exit__(self, *_: object) -> None:
        """End the background thread; a save that the ranks have not agreed on stays hidden."""
        self._background.shutdown(wait=True, cancel_futures=True)

    @property
    def _request(self) -> Path:
        return self.checkpoints.run_dir.save_request

    def _is_overdue(self) -> bool:
        """Tell whether the last save, or the first step, lies more than the interval back."""
        minutes, now = self.config.interval_minutes, self.clock()
        if self._saved_at is None:
            self._saved_at = now
        return minutes is not None and now - self._saved_at >= 60.0 * minutes

    def _first_rank_says(self, value: bool) -> bool:
        return self.world.all_agree(value or not self.world.is_first)

    def _write(self, snapshot: StateSnapshot) -> None:
        folder = self.checkpoints.staging(snapshot.progress.step)
        with self._heartbeat.working(f"checkpoint {snapshot.progress.step}", DISK_SECONDS):
            snapshot.write(folder, self.world.rank, self.files)

    def _look(self, *, wait_for_it: bool) -> None:
        """Advance the save in progress as far as all ranks have come, or to its end."""
        while (save := self._save) is not None:
            if wait_for_it:
                while wait([save.running], timeout=BEAT_SECONDS).not_done:
                    beat(f"waits for checkpoint {save.step}")
            if not self.world.all_agree(save.running.done()):
                return
            if self._is_failed(save):
                return
            if save.is_sealing or self.seal is None:
                self._finish(save)
            else:
                self._save = _Save(save.step, self._background.submit(self._seal, save.step), True)

    def _seal(self, step: int) -> None:
        if self.world.is_first and self.seal is not None:
            with self._heartbeat.working(f"checkpoint {step}", DISK_SECONDS):
                self.seal(step)

    def _finish(self, save: _Save) -> None:
        self._save, self._saved_version = None, save.step
        self.num_failed, self._failed = 0, None
        if self.world.is_first:
            self.announce(save.step)

    def _is_failed(self, save: _Save) -> bool:
        """Tell whether the save failed on any rank; then it is cleaned up and counted.

        Only a disk error is tolerated; any other error ends all ranks.
        """
        error = save.running.exception()
        if self.world.all_agree(error is None):
            return False
        self._save = None
        if isinstance(error, OSError):
            error = storage_error(error, self.checkpoints.run_dir.checkpoints)
        is_bearable = self.world.all_agree(error is None or isinstance(error, StorageError))
        if error is not None and not is_bearable:
            raise error
        if not is_bearable:
            raise ProcessError("another rank failed to save; its own message says why")
        self.num_failed += 1
        if isinstance(error, StorageError):
            text = "checkpoint %d is not saved (%d in a row), training goes on: %s"
            logger.error(text, save.step, self.num_failed, error)
            if self.num_failed == 1:
                add_line(self.checkpoints.run_dir.notices, text % (save.step, 1, error))
        else:
            error = StorageError("another rank failed to save; its own message says why")
        self._failed = save.step, error
        if self.world.is_first:
            self.checkpoints.discard(save.step)
        return True


def resume(state: TrainingState, checkpoints: CheckpointStore, step: int) -> TrainingProgress:
    """Load checkpoint `step` into all ranks, after the first of them has verified every byte."""
    try:
        with busy(f"loading checkpoint {step}", DISK_SECONDS):
            state.world.first_rank_does(lambda: _verify(state, checkpoints, step))
            progress = state.load(checkpoints.locate(step).part(PART))
    except (ConfigError, CorruptStateError) as error:
        left = [folder for folder, _ in checkpoints.folders()]
        if step in left or not left or max(left) < step:
            raise
        # The orchestrator of a trainer that starts again alone may commit those under way.
        raise StorageError(f"{error}; continue from checkpoint {max(left)}") from error
    if progress.step != step:
        raise CorruptStateError(f"checkpoint {step} holds the trainer's state of {progress.step}")
    logger.info("continues with step %d, saved by %d ranks", step, progress.num_ranks)
    return progress


def _verify(state: TrainingState, checkpoints: CheckpointStore, step: int) -> None:
    saved = read_progress(checkpoints.load(step).part(PART))
    state.origin.refuse_other(saved.origin)


def check_space(
    state: TrainingState, run_dir: RunDirectory, config: CheckpointConfig, *, is_fresh: bool
) -> None:
    """Refuse to begin beside a disk that cannot hold one checkpoint; warn when it cannot hold two
    more, or a run that continues none."""
    if not config.is_on:
        return
    needed, free = state.num_bytes(), free_bytes(run_dir.checkpoints)
    if free is None:
        return
    if needed > free and is_fresh:
        raise FullDiskError(
            f"{run_dir.checkpoints}: one checkpoint needs about {needed:,} bytes, {free:,} are "
            "free; make room, choose another output_dir, or save nothing with "
            "checkpoint.interval_steps and checkpoint.interval_minutes None"
        )
    kept = config.keep_last + 1
    if needed * max(SPARE_FACTOR, kept) > free:
        logger.warning(
            "%s: %d checkpoints of about %s bytes do not fit into the %s bytes that are free",
            run_dir.checkpoints,
            kept,
            f"{needed:,}",
            f"{free:,}",
        )

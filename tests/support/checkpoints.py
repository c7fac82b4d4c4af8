"""Checkpoints for tests: run directories, staged parts, and a disk that fails on request."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradus.files import DurableFiles, storage_error
from gradus.run.checkpoints import Checkpoint, CheckpointStore
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory
from gradus.wire.codec import decode, encode

T = TypeVar("T")
PARTS = ("trainer", "orchestrator")


def reread(state: T) -> T:
    """What a restart finds of the state of a piece."""
    found: T = decode(encode(state), type(state))  # type: ignore[arg-type]
    return found


class Crash(BaseException):
    """The process is gone: nothing after it runs, not even an except clause for errors."""


class FaultyFiles(DurableFiles):
    """A disk on which operation number `at` goes wrong, before or after its effect."""

    def __init__(self, at: int | None = None, *, after: bool = False, full: bool = False) -> None:
        self.operations: list[str] = []
        self._at = at
        self._after = after
        self._full = full
        self._lock = threading.Lock()
        """Files are synced in threads."""

    def make_folder(self, folder: Path) -> None:
        self._run("make_folder", folder, lambda: super(FaultyFiles, self).make_folder(folder))

    def stage(self, path: Path, content: bytes) -> None:
        self._run("stage", path, lambda: super(FaultyFiles, self).stage(path, content))

    def write(self, path: Path, content: bytes) -> None:
        self._run("write", path, lambda: super(FaultyFiles, self).write(path, content))

    def write_by(self, path: Path, writer: Callable[[Path], None], *, num_bytes: int) -> None:
        def action() -> None:
            super(FaultyFiles, self).write_by(path, writer, num_bytes=num_bytes)

        self._run("write_by", path, action)

    def sync(self, path: Path) -> None:
        self._run("sync", path, lambda: super(FaultyFiles, self).sync(path))

    def rename(self, source: Path, target: Path) -> None:
        self._run("rename", target, lambda: super(FaultyFiles, self).rename(source, target))

    def delete(self, folder: Path) -> None:
        self._run("delete", folder, lambda: super(FaultyFiles, self).delete(folder))

    def _run(self, name: str, path: Path, action: Callable[[], None]) -> None:
        with self._lock:
            self.operations.append(name)
            is_due = len(self.operations) - 1 == self._at
        if is_due and self._full:
            raise storage_error(OSError(errno.ENOSPC, "No space left on device"), path)
        if is_due and not self._after:
            raise Crash
        action()
        if is_due:
            raise Crash


def new_run(folder: Path, name: str = "demo") -> RunDirectory:
    """A run directory with its marker."""
    run_dir = RunDirectory(folder / name)
    run_dir.root.mkdir(parents=True)
    mark_run(run_dir, "rl")
    return run_dir


def stage(checkpoints: CheckpointStore, step: int, text: str = "") -> Path:
    """Both parts of checkpoint `step`, with contents that depend on step and `text`."""
    folder = checkpoints.staging(step)
    for part in PARTS:
        (folder / part).mkdir(exist_ok=True)
        (folder / part / "weights.bin").write_bytes(f"{part} {step} {text}".encode() * 50)
    return folder


def commit(checkpoints: CheckpointStore, step: int, text: str = "") -> Checkpoint:
    """A committed checkpoint of `step`."""
    stage(checkpoints, step, text)
    return checkpoints.commit(step, PARTS)


def committed_names(run_dir: RunDirectory) -> list[str]:
    """Names of the folders that are not hidden."""
    return sorted(p.name for p in run_dir.checkpoints.iterdir() if not p.name.startswith("."))

"""The lease makes one process the only writer of a run directory, fenced by an epoch.

Whoever takes the lease raises the epoch. Every message, temporary name and admin call carries it,
and `check_epoch` refuses one that is older than the lease file says. A lock on `lease.lock` tells a
living owner from a dead one on this host; the epoch also fences where locks do not reach.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError, CorruptStateError, FencedError, RunDirectoryError
from gradus.process_table import is_alive, read_process
from gradus.run_dir import RunDirectory, read_json, write_json
from gradus.supervise import end_leftovers

MARKER_NAME = ".gradus-run"
"""File that makes a folder ours; nothing without it is ever deleted."""

LEFTOVERS_SECONDS = 7.0
"""Time for processes of a killed launcher to end by themselves before `clean` kills them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOCK_NAME = "lease.lock"
_KEPT_BY_CLEAN = {_LOCK_NAME, "lease.json", MARKER_NAME}


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease."""

    host: str
    pid: int
    start_time: int
    taken_at: float

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        entry = read_process(os.getpid())
        return cls(socket.gethostname(), os.getpid(), entry.start_time if entry else 0, time.time())

    def describe(self) -> str:
        """A text such as "pid 123 on host node1, since 2026-01-01 12:00:00"."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.taken_at))
        return f"pid {self.pid} on host {self.host}, since {since}"

    @property
    def is_known_alive(self) -> bool:
        """True when the owner runs on this host."""
        return self.host == socket.gethostname() and is_alive(self.pid, self.start_time)


class RunLease:
    """The right to write into one run directory; held until `release` or the end of the process.

    >>> lease = RunLease.take(RunDirectory(Path("runs/demo")))  # doctest: +SKIP
    >>> lease.epoch  # doctest: +SKIP
    1
    """

    def __init__(self, run_dir: RunDirectory, epoch: int, lock: int) -> None:
        self.run_dir = run_dir
        self.epoch = epoch
        self._lock = lock

    @classmethod
    def take(cls, run_dir: RunDirectory) -> RunLease:
        """Become the writer with a higher epoch than any before.

        Refuses with RunDirectoryError, naming owner and pid, while another process holds the lease.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(run_dir.root / _LOCK_NAME, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            epoch, owner = _read_lease(run_dir)
            if owner is not None and owner.is_known_alive:
                raise _in_use(run_dir, owner)
            _write_lease(run_dir, epoch + 1, Owner.current())
        except BlockingIOError:
            os.close(lock)
            raise _in_use(run_dir, _read_lease(run_dir)[1]) from None
        except BaseException:
            os.close(lock)
            raise
        return cls(run_dir, epoch + 1, lock)

    def check(self) -> None:
        """FencedError when a newer owner holds the run directory."""
        check_epoch(self.run_dir, self.epoch)

    def release(self) -> None:
        """Let the next one take the lease; the epoch stays. Twice is harmless."""
        if self._lock < 0:
            return
        if read_epoch(self.run_dir) == self.epoch:
            _write_lease(self.run_dir, self.epoch, None)
        os.close(self._lock)
        self._lock = -1


def read_epoch(run_dir: RunDirectory) -> int:
    """The epoch of the run's lease; 0 when nobody ever took it."""
    return _read_lease(run_dir)[0]


def check_epoch(run_dir: RunDirectory, epoch: int) -> None:
    """FencedError when the lease says a higher epoch than `epoch`."""
    current, owner = _read_lease(run_dir)
    if current <= epoch:
        return
    holder = f"by {owner.describe()}" if owner else "and was released since"
    raise FencedError(
        f"run directory {run_dir.root} was taken over with epoch {current} {holder}; "
        f"this process has epoch {epoch} and must stop"
    )


def open_run(output_dir: Path, name: str, *, clean: bool = False, resume: bool = False) -> RunLease:
    """Create (mode 0700) or reuse the run directory `output_dir/name` and take its lease.

    Refuses a directory that is in use, that is not ours, or that already holds a run, unless
    `clean` allows to delete that run or `resume` to go on with it. `resume` refuses a directory
    without a run, and ends what a killed launcher of that run left behind.
    """
    run_dir = RunDirectory(run_path(output_dir, name))
    if resume:
        return _reopen(run_dir)
    _create(run_dir.root)
    lease = RunLease.take(run_dir)
    try:
        _make_empty(run_dir, clean=clean)
        run_dir.root.chmod(0o700)
        write_json(run_dir.root / MARKER_NAME, {"run_id": name, "format": 1})
    except BaseException:
        lease.release()
        raise
    return lease


def _reopen(run_dir: RunDirectory) -> RunLease:
    if not run_dir.root.is_dir() or _marked_run_id(run_dir) is None:
        raise RunDirectoryError(
            f"{run_dir.root} holds no run to resume; look at --name and output_dir, or start the "
            "run without --resume"
        )
    lease = RunLease.take(run_dir)
    try:
        end_leftovers(run_dir.processes, timeout_seconds=LEFTOVERS_SECONDS)
    except BaseException:
        lease.release()
        raise
    return lease


def run_path(output_dir: Path, name: str) -> Path:
    """`output_dir/name`; refuses names and links that lead out of `output_dir`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"run name {name!r} is not usable as a folder; use 1 to 64 letters, digits, "
            "'.', '_' or '-', starting with a letter or digit"
        )
    parent = output_dir.resolve()
    path = parent / name
    if path.resolve() != path:
        raise RunDirectoryError(
            f"run directory {path} is a link to {path.resolve()}; "
            "remove the link or choose another name"
        )
    return path


def _create(root: Path) -> None:
    """Make the folder, or accept an existing one that is empty or ours."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        content = {path.name for path in root.iterdir()}
    except OSError as error:
        raise RunDirectoryError(
            f"run directory {root} cannot be created ({error.strerror}); choose another output_dir"
        ) from error
    if content and not content & {MARKER_NAME, _LOCK_NAME}:
        raise RunDirectoryError(
            f"{root} exists and is not a run of gradus; choose another name or output_dir"
        )


def _make_empty(run_dir: RunDirectory, *, clean: bool) -> None:
    """Delete the finished or dead run inside when `clean` allows it, else refuse.

    What a dry run left, `config` alone, is no run and always goes.
    """
    content = sorted(p for p in run_dir.root.iterdir() if p.name not in _KEPT_BY_CLEAN)
    if not content:
        return
    if not clean and [path.name for path in content] != ["config"]:
        raise RunDirectoryError(
            f"run directory {run_dir.root} already holds a run; "
            "go on with --resume, delete that run with --clean, or choose another name"
        )
    if _marked_run_id(run_dir) != run_dir.root.name:
        raise RunDirectoryError(
            f"{run_dir.root} does not carry the marker of this run; "
            "gradus deletes only its own runs"
        )
    end_leftovers(run_dir.processes, timeout_seconds=LEFTOVERS_SECONDS)
    for path in content:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _marked_run_id(run_dir: RunDirectory) -> str | None:
    marker = run_dir.root / MARKER_NAME
    if marker.is_symlink() or not marker.is_file():
        return None
    value = read_json(marker)
    return value.get("run_id") if isinstance(value, dict) else None


def _read_lease(run_dir: RunDirectory) -> tuple[int, Owner | None]:
    try:
        value: Any = read_json(run_dir.lease)
    except FileNotFoundError:
        return 0, None
    try:
        owner = value["owner"]
        return int(value["epoch"]), None if owner is None else Owner(**owner)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"{run_dir.lease} is not a lease ({error}); delete it") from error


def _write_lease(run_dir: RunDirectory, epoch: int, owner: Owner | None) -> None:
    write_json(run_dir.lease, {"epoch": epoch, "owner": None if owner is None else vars(owner)})


def _in_use(run_dir: RunDirectory, owner: Owner | None) -> RunDirectoryError:
    who = owner.describe() if owner else "a process that just took it"
    return RunDirectoryError(
        f"run directory {run_dir.root} is in use by {who}; stop that run or choose another name"
    )

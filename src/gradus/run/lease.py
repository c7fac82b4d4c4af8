"""The lease makes one process the only writer of a run directory, fenced by a term.

Whoever takes the lease raises the term. Every message, temporary name and admin call carries it,
and `check_term` refuses one that is older than the lease file says. A lock on `lease.lock` tells a
living owner from a dead one on this host; the term also fences where locks do not reach.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from gradus.errors import ConfigError, CorruptStateError, FencedError, RunDirectoryError
from gradus.files import read_json, remove, take_lock, write_json
from gradus.processes.leftovers import end_leftovers
from gradus.processes.table import is_alive, read_process
from gradus.run.growing_files import audit
from gradus.run.paths import RunDirectory

MARKER_NAME = ".gradus-run"
"""File that makes a folder ours; nothing without it is ever deleted."""

LEFTOVERS_SECONDS = 7.0
"""Time for processes of a killed launcher to end by themselves before `clean` kills them."""

MARKER_FORMAT = 3

RunKind = Literal["rl", "sft", "eval", "replay", "bench"]
"""What made a run directory; no command writes into one that another kind made."""

_RESUMABLE: tuple[RunKind, ...] = ("rl", "sft", "eval")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_TERM = 10**8
"""Terms stand in names of folders with eight digits."""
POD_VARIABLE = "GRADUS_POD"
"""In a pod that Kubernetes starts as a launcher: which one it is, of all there ever were."""
STARTER_VARIABLE = "GRADUS_NODE_SIDES"
"""For a launcher: who starts its node sides, where no person does."""
_LOCK_NAME = "lease.lock"
_LET_GO: set[Path] = set()
"""Runs of which this process is the owner by a note alone that a full disk kept."""
_KEPT_BY_CLEAN = {_LOCK_NAME, "lease.json", MARKER_NAME}


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease."""

    host: str
    pid: int
    start_time: int
    taken_at: float
    job: str | None = None
    """Number of the job of SLURM that it runs in."""
    num_requeued: int = 0
    """How often SLURM had put that job back before."""
    pod: str | None = None
    """The pod that it runs in, where Kubernetes starts it."""

    @classmethod
    def current(cls) -> Owner:
        entry, job = read_process(os.getpid()), os.environ.get("SLURM_JOB_ID")
        own = (socket.gethostname(), os.getpid(), entry.start_time if entry else 0, time.time())
        num_requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(*own, job, num_requeued, os.environ.get(POD_VARIABLE))

    @property
    def is_given_up(self) -> bool:
        """Whether a scheduler has started the job of this owner again, as this process: on a node
        that is cut off it may still run, until it sees the higher term."""
        now = Owner.current()
        if self.pod is not None and now.pod is not None:
            return self.pod != now.pod
        return self.job is not None and self.job == now.job and self.num_requeued < now.num_requeued

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.taken_at))
        return f"pid {self.pid} on host {self.host}, since {since}"

    @property
    def is_known_alive(self) -> bool:
        is_here = self.host == socket.gethostname()
        return is_here and not self.is_given_up and is_alive(self.pid, self.start_time)


class RunOpener(Protocol):
    """`open_run`, `reopen_run` or `preview_run`, with its options chosen."""

    def __call__(self, output_dir: Path, name: str, *, kind: RunKind) -> RunLease:
        """The lease of the run directory `output_dir/name`."""


@dataclass(frozen=True)
class RunMarker:
    """What `.gradus-run` says of a folder."""

    run_id: str
    """The run's own name, also after its folder was renamed."""
    kind: str
    """The `RunKind` of the command that made it."""


class RunLease:
    """The right to write into one run directory; held until `release` or the end of the process."""

    def __init__(self, run_dir: RunDirectory, term: int, lock: int) -> None:
        self.run_dir = run_dir
        self.term = term
        self._lock = lock

    @classmethod
    def take(cls, run_dir: RunDirectory) -> RunLease:
        """Become the writer with a higher term than any before.

        Refuses with RunDirectoryError, naming owner and pid, while another process holds the lease.
        """
        lease = cls.reserve(run_dir)
        try:
            lease.claim()
        except BaseException:
            lease.release()
            raise
        return lease

    @classmethod
    def reserve(cls, run_dir: RunDirectory) -> RunLease:
        """Keep other writers out, with the refusals of `take`; nothing is written until `claim`."""
        owner = _read_lease(run_dir)[1]
        if owner is not None and owner.is_given_up:
            (run_dir.root / _LOCK_NAME).unlink(missing_ok=True)  # its lock may never be let go
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(run_dir.root / _LOCK_NAME, flags, 0o600)
        try:
            take_lock(lock, run_dir.root)
            _refuse_in_use(run_dir)
            return cls(run_dir, read_term(run_dir) + 1, lock)
        except BlockingIOError:
            os.close(lock)
            raise _in_use(run_dir, _read_lease(run_dir)[1]) from None
        except BaseException:
            os.close(lock)
            raise

    @property
    def is_held(self) -> bool:
        """Whether it keeps others out; not so that of a preview."""
        return self._lock >= 0

    def claim(self) -> None:
        """Write owner and term down, which fences every earlier owner."""
        _LET_GO.discard(self.run_dir.root)
        _write_lease(self.run_dir, self.term, Owner.current())

    def renew(self) -> None:
        """Raise the term without letting go: what processes of the last one still say is refused.

        FencedError when a newer owner holds the run directory.
        """
        self.check()
        _write_lease(self.run_dir, self.term + 1, Owner.current())
        self.term += 1
        audit(self.run_dir, "restarted", term=self.term)

    def check(self) -> None:
        """FencedError when a newer owner holds the run directory."""
        check_term(self.run_dir, self.term)

    def release(self) -> None:
        """Let the next one take the lease; the term stays. Twice is harmless."""
        if self._lock < 0:
            return
        # A disk that takes no note keeps nobody out, for the lock tells who is gone.
        try:
            if read_term(self.run_dir) == self.term:
                _write_lease(self.run_dir, self.term, None)
        except OSError:
            _LET_GO.add(self.run_dir.root)
        finally:
            os.close(self._lock)
            self._lock = -1


def read_term(run_dir: RunDirectory) -> int:
    """The term of the run's lease; 0 when it was never taken."""
    return _read_lease(run_dir)[0]


def is_in_use(run_dir: RunDirectory) -> bool:
    """Whether a launch holds the run; of an owner on another host, whether it never let go."""
    owner = _read_lease(run_dir)[1]
    if owner is None:
        return False
    return owner.is_known_alive or owner.host != socket.gethostname()


def check_term(run_dir: RunDirectory, term: int) -> None:
    """FencedError when the lease says a higher term than `term`."""
    current, owner = _read_lease(run_dir)
    if current <= term:
        return
    holder = f"by {owner.describe()}" if owner else "and was released since"
    raise FencedError(
        f"run directory {run_dir.root} was taken over with term {current} {holder}; "
        f"this process has term {term} and must stop"
    )


def open_run(output_dir: Path, name: str, *, kind: RunKind, clean: bool = False) -> RunLease:
    """Create (mode 0700) or reuse the run directory `output_dir/name` and take its lease.

    Refuses, before anything is touched, a directory that is in use, that is not ours, or that
    already holds a run, unless `clean` allows to delete that run, which must be of the same kind.
    """
    run_dir = RunDirectory(run_path(output_dir, name))
    _refuse_to_replace(run_dir, kind, clean=clean)
    _create(run_dir.root)
    lease = RunLease.take(run_dir)
    try:
        # Another process may have put a run there before the lease was ours.
        content = _refuse_to_replace(run_dir, kind, clean=clean, is_ours=True)
        _delete(run_dir, content)
        run_dir.root.chmod(0o700)
        mark_run(run_dir, kind)
    except BaseException:
        lease.release()
        raise
    return lease


def reopen_run(output_dir: Path, name: str, *, kind: RunKind) -> RunLease:
    """Reserve an existing run of that name and kind; what a killed launcher left is ended.

    No file changes before the caller claims the lease.
    """
    run_dir = RunDirectory(run_path(output_dir, name))
    _refuse_to_resume(run_dir, kind)
    lease = RunLease.reserve(run_dir)
    try:
        end_leftovers(run_dir.processes, timeout_seconds=LEFTOVERS_SECONDS)
    except BaseException:
        lease.release()
        raise
    return lease


def preview_run(output_dir: Path, name: str, *, kind: RunKind, resume: bool = False) -> RunLease:
    """A lease that is never taken, with all refusals of the real one; nothing changes on disk."""
    run_dir = RunDirectory(run_path(output_dir, name))
    if resume:
        _refuse_to_resume(run_dir, kind)
    else:
        _refuse_to_replace(run_dir, kind, clean=False)
    return RunLease(run_dir, read_term(run_dir) + 1, lock=-1)


def choose_opener(*, resume: bool, clean: bool, dry_run: bool) -> RunOpener:
    """What opens the run directory for the options of a command line.

    >>> choose_opener(resume=False, clean=False, dry_run=False) is open_run
    True
    """
    if resume and clean:
        raise ConfigError("--clean deletes what --resume needs; use one of them")
    if dry_run and clean:
        raise ConfigError("--clean deletes a run and --dry-run changes none; use one of them")
    if dry_run:
        return partial(preview_run, resume=resume)
    if resume:
        return reopen_run
    return partial(open_run, clean=True) if clean else open_run


def mark_run(run_dir: RunDirectory, kind: RunKind, *, run_id: str | None = None) -> None:
    marker = {"run_id": run_id or run_dir.root.name, "kind": kind, "format": MARKER_FORMAT}
    write_json(run_dir.root / MARKER_NAME, marker)


def read_marker(run_dir: RunDirectory) -> RunMarker | None:
    """What the marker in a folder says; None when the folder has none.

    ConfigError for the marker of another version of gradus, CorruptStateError for a damaged one.
    """
    path = run_dir.root / MARKER_NAME
    if path.is_symlink() or not path.is_file():
        return None
    try:
        value = read_json(path)
    except CorruptStateError as error:
        raise CorruptStateError(
            f"{path} cannot be read ({error.__cause__}), so gradus leaves this folder alone; "
            "restore the file, or take what you need and delete the folder yourself"
        ) from error
    try:
        if value["format"] != MARKER_FORMAT:
            raise ConfigError(
                f"{run_dir.root} is a run of another version of gradus (format {value['format']}, "
                f"this version has {MARKER_FORMAT}); use that version, use another name, or delete "
                "the folder yourself"
            )
        return RunMarker(str(value["run_id"]), str(value["kind"]))
    except (KeyError, TypeError) as error:
        raise CorruptStateError(
            f"{path} does not say which run this is ({error!r}); restore it"
        ) from error


def run_at(folder: str | Path) -> RunDirectory:
    """The folder of a run, finished or not; ConfigError for any other."""
    run_dir = RunDirectory(Path(folder))
    if not run_dir.root.is_dir() or read_marker(run_dir) is None:
        raise ConfigError(f"{folder} is not a folder of a run (seen from {Path.cwd()})")
    return run_dir


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


def _refuse_to_resume(run_dir: RunDirectory, kind: RunKind) -> None:
    marker = read_marker(run_dir)
    if marker is None:
        raise RunDirectoryError(
            f"{run_dir.root} holds no run to resume; look at --name and output_dir, or start the "
            "run without --resume"
        )
    if marker.kind != kind:
        raise _of_another_kind(run_dir, marker, kind)
    # First: files of a running run come and go.
    _refuse_in_use(run_dir)
    _refuse_links(run_dir)


def _refuse_links(run_dir: RunDirectory) -> None:
    """The owner may move a folder of the run to another disk; nothing is written through a link
    to a file, which may lie anywhere. What the owner keeps beside the run's own files is theirs."""
    control = run_dir.save_request.parent
    own = (*run_dir.directly_below(), control, run_dir.root / _LOCK_NAME)
    within = (run_dir.logs, run_dir.ready, run_dir.secrets, control)
    for path in (*own, *(path for folder in within for path in folder.rglob("*"))):
        if not path.is_symlink():
            if path.exists() and not path.is_dir() and not path.is_file():
                raise RunDirectoryError(f"{path} is neither file nor folder; move it away")
            continue
        if not path.is_dir() or path.lstat().st_uid != os.geteuid():
            raise RunDirectoryError(
                f"{path} is a link to {path.readlink()}; of a run only its folders may be links, "
                "made by you: put the file itself there, or remove the link"
            )


def _refuse_to_replace(
    run_dir: RunDirectory, kind: RunKind, *, clean: bool, is_ours: bool = False
) -> list[Path]:
    """Refuse what must not become, or not be deleted for, a new run; gives what would go.

    What a launch left that never began, `config` alone, is not a run and always goes.
    """
    root = run_dir.root
    _refuse_nesting(root)
    content = _content(root)
    if not content:
        return []
    if not {path.name for path in content} & {MARKER_NAME, _LOCK_NAME}:
        raise RunDirectoryError(
            f"{root} exists and is not a run of gradus; choose another name or output_dir"
        )
    if not is_ours:
        _refuse_in_use(run_dir)
    content = [path for path in content if path.name not in _KEPT_BY_CLEAN]
    marker = read_marker(run_dir)
    if marker is not None and marker.kind != kind and content:
        raise _of_another_kind(run_dir, marker, kind)
    if content and not clean and [path.name for path in content] != ["config"]:
        resume = "continue with --resume, " if kind in _RESUMABLE else ""
        raise RunDirectoryError(
            f"run directory {root} already holds a run; "
            f"{resume}delete that run with --clean, or choose another name"
        )
    if content and (marker is None or marker.run_id != root.name):
        raise RunDirectoryError(
            f"{root} does not carry the marker of this run; gradus deletes only its own runs"
        )
    if content and not is_ours:
        _refuse_far_owner(run_dir)
    if inner := next((path for path in root.rglob(MARKER_NAME) if path.parent != root), None):
        raise RunDirectoryError(
            f"another run lies in this one, {inner.parent}, and would go with it; move it away, or "
            "choose another name"
        )
    return content


def _refuse_nesting(root: Path) -> None:
    for parent in root.parents:
        if (parent / MARKER_NAME).is_file():
            raise RunDirectoryError(
                f"{root} would lie inside the run {parent} and go when that run is deleted; choose "
                "another output_dir"
            )


def _refuse_far_owner(run_dir: RunDirectory) -> None:
    """Refuse to delete a run that was not released and that may run where we cannot look."""
    owner = _read_lease(run_dir)[1]
    if owner is not None and owner.host != socket.gethostname():
        raise RunDirectoryError(
            f"run directory {run_dir.root} was taken by {owner.describe()} and never released; it "
            "may still run there. Stop it or use --clean there; if it is gone, delete the folder "
            "yourself"
        )


def _of_another_kind(run_dir: RunDirectory, marker: RunMarker, kind: RunKind) -> RunDirectoryError:
    return RunDirectoryError(
        f"{run_dir.root} holds a run of kind '{marker.kind}' and this command makes runs of kind "
        f"'{kind}'; it neither continues that run nor deletes it. Choose another name"
    )


def _content(root: Path) -> list[Path]:
    """What lies in the folder; nothing when there is none."""
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(
            f"run directory {root} cannot be used ({error.strerror}); choose another name or "
            "output_dir"
        ) from error


def _create(root: Path) -> None:
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"run directory {root} cannot be created ({error.strerror}); choose another output_dir"
        ) from error


def _delete(run_dir: RunDirectory, content: list[Path]) -> None:
    """Delete a finished or dead run, after what is left of its processes."""
    if not content:
        return
    end_leftovers(run_dir.processes, timeout_seconds=LEFTOVERS_SECONDS)
    for path in content:
        remove(path)


def _refuse_in_use(run_dir: RunDirectory) -> None:
    owner = _read_lease(run_dir)[1]
    if owner is not None and owner.is_known_alive and run_dir.root not in _LET_GO:
        raise _in_use(run_dir, owner)


def _read_lease(run_dir: RunDirectory) -> tuple[int, Owner | None]:
    try:
        value: Any = read_json(run_dir.lease)
    except FileNotFoundError:
        return 0, None
    try:
        owner, term = value["owner"], int(value["term"])
        if not 0 <= term < _MAX_TERM:
            raise ValueError(f"term {term:.6g} is none that launches count up to")
        return term, None if owner is None else Owner(**owner)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"{run_dir.lease} is not a lease ({error}); delete it") from error


def _write_lease(run_dir: RunDirectory, term: int, owner: Owner | None) -> None:
    write_json(run_dir.lease, {"term": term, "owner": None if owner is None else vars(owner)})


def _in_use(run_dir: RunDirectory, owner: Owner | None) -> RunDirectoryError:
    who = owner.describe() if owner else "a process that just took it"
    return RunDirectoryError(
        f"run directory {run_dir.root} is in use by {who}; stop that run or choose another name"
    )

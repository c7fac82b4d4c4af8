"""Child processes that start, become ready, and end together, whoever is killed first.

Parent side: `Supervisor` starts each child in its own session, keeps pid and start time in a
registry, and ends every process that descends from its children. Child side: `watch_death_pipe`
(of `child.py`) ends a child whose parent is gone, also after kill -9 of the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.errors import ExitCode, ProcessError
from gradus.files import write_json
from gradus.processes.child import DEATH_PIPE_VARIABLE, LAUNCH_VARIABLE
from gradus.processes.leftovers import (
    KILL_SECONDS,
    POLL_SECONDS,
    TEMPORARY_PREFIX,
    belonging_to,
    launch_of,
)
from gradus.processes.listening import LISTENER_VARIABLE, bind
from gradus.processes.liveness import Hang
from gradus.processes.log_tail import log_end
from gradus.processes.log_writer import LOG_FLAGS, LogWriter
from gradus.processes.started import (
    Child,
    ChildFailed,
    ChildHere,
    ChildNotReady,
    ChildSilent,
    LastMemory,
    OtherNodes,
    ProcessFailed,
    ProcessSpec,
    is_done,
    ready_content,
)
from gradus.processes.table import (
    ProcessEntry,
    catches,
    children_in_other_sessions,
    descendants,
    living_processes,
    memory_kills,
    own_mark,
    read_process,
    resident_bytes,
    signal_process,
    stopped_processes,
    zombie_children,
)

_BLAME_SECONDS = 1.0
_STACK_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
NUM_NAME_CHARACTERS = 16
"""Of the run in the name of its temporary folder: paths of sockets must stay short."""
RESTART_WAIT_SECONDS, MOST_RESTART_WAIT_SECONDS = 0.25, 60.0
"""Before a restart of a child: four times as long with each one lately, up to the most."""
RESTART_WINDOW_SECONDS, LATELY_SECONDS = 3600.0, 300.0
"""Older restarts do not count: a run of weeks may lose a process now and then."""


@dataclass(frozen=True)
class _Restart:
    """A child to start again, at a monotonic time and a position among the children."""

    at: float
    position: int
    spec: ProcessSpec
    ready_seconds: float | None = None
    """Deadline for its ready file. None where another process waits for it."""


class Supervisor:
    """Owns the children of one launch, and all processes below them."""

    def __init__(
        self,
        registry: Path,
        *,
        stop_timeout_seconds: float,
        on_restart: Callable[[str], None] = lambda _: None,
        logs: LogWriter | None = None,
        elsewhere: OtherNodes | None = None,
    ) -> None:
        """`on_restart` gets one line for a person about each planned restart, and about a companion
        that is not restarted any more.

        `logs`, closed by `stop`, writes what the children say; without it they do so themselves.
        `elsewhere` starts those of other nodes.
        """
        self._elsewhere = elsewhere
        self._registry, self._has_listed = registry, False
        self._logs = logs
        self._stop_timeout_seconds = stop_timeout_seconds
        self._mark = own_mark()
        # Of a notebook, say, which waits for them itself.
        before = (e for e in living_processes() if e.parent == os.getpid())
        self._strangers = {(e.pid, e.start_time) for e in before}
        self._temporary: Path | None = None
        self.children: list[Child] = []
        self._on_restart = on_restart
        self._restarted_at: dict[str, list[float]] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._restarts_due: list[_Restart] = []
        self._not_ready_again: dict[int, float] = {}  # pid of a replacement → its deadline
        self._hangs: dict[int, ChildSilent] = {}
        self._ended: dict[str, dict[str, Any]] = {}  # name → how the one before the restart ended
        self._held_bytes: dict[int, int] = {}
        self._memory_kills = memory_kills()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, spec: ProcessSpec) -> Child:
        """Start one child; it is in the registry when this returns."""
        if self._elsewhere is not None:
            spec = self._elsewhere.complete(spec)
        if spec.node:
            assert self._elsewhere is not None
            self.children.append(self._elsewhere.start(spec))
            return self.children[-1]
        listener = self._listener(spec)
        env = {**spec.env, **self._temporary_variables(spec), LAUNCH_VARIABLE: self._mark}
        read_end, write_end = os.pipe()
        env[DEATH_PIPE_VARIABLE] = f"{read_end}:{os.fstat(read_end).st_ino}"
        if listener is not None:
            env[LISTENER_VARIABLE] = str(listener.fileno())
        passed = [read_end, *([] if listener is None else [listener.fileno()])]
        log_start = log_end(spec.log)
        try:
            process = _spawn(spec, env, passed, self._logs)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        entry = read_process(process.pid)
        start_time = entry.start_time if entry else 0
        child = ChildHere(spec, time.monotonic(), log_start, process, start_time, write_end)
        self.children.append(child)
        self._write_registry(self.children)
        return child

    def wait_ready(
        self,
        children: Iterable[Child],
        *,
        timeout_seconds: float,
        on_ready: Callable[[Child, Mapping[str, Any]], None] = lambda *_: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Return when each of `children` has written its ready file.

        `on_ready` gets each child with the content of its file; `on_wait` is called often and may
        raise. Raises ChildFailed when any child of this supervisor ends meanwhile, and
        ChildNotReady after `timeout_seconds` since the child's start.
        """
        waiting = list(children)
        while waiting:
            for child in list(waiting):
                content = ready_content(child.spec)
                if content is not None:
                    waiting.remove(child)
                    on_ready(child, content)
            self.check(not_ready=waiting)
            for child in waiting:
                if child.seconds() > timeout_seconds:
                    self._sync_logs()
                    raise ChildNotReady(child, timeout_seconds)
            on_wait()
            if waiting:
                self.pause()

    def check(self, *, not_ready: Sequence[Child] = ()) -> None:
        """Raise ChildFailed for a child that ended although it may not, or while `not_ready`.

        A child with restarts left is restarted, after a wait that grows each time. When
        several ended at once, the one started first is the cause: later ones depend on it.
        ChildNotReady for a replacement that takes too long.
        """

        def may_restart(child: Child) -> bool:
            return self._has_restarts_left(child) and child not in not_ready

        self._start_due()
        self._look_after_companions()
        not_ready = [*not_ready, *self._replacements()]
        failed = self._failed()
        if failed is None:
            return
        # Whoever asks a process that ends may be gone before it: look again for an earlier one.
        child, code = failed
        deadline = time.monotonic() + _BLAME_SECONDS
        is_known = child is self.children[0] or child.pid in self._hangs or may_restart(child)
        while child is failed[0] and not is_known and time.monotonic() < deadline:
            self.pause()
            child, code = self._failed() or failed
        error = self.failure_of(child, code)
        if not may_restart(child):
            raise error
        self._plan_restart(child, error)

    def _look_after_companions(self) -> None:
        """A companion that ended is restarted, or done without."""
        for child in list(self.companions()):
            code = child.exit_code()
            if code is None:
                continue
            error = self.failure_of(child, code)
            if code != ExitCode.CONFIG and self._has_restarts_left(child):
                self._plan_restart(child, error)
            else:
                self.bury(child)
                self._on_restart(f"{error}; the run continues without it")

    def end_hung(self, hang: Hang) -> None:
        """Kill a child that hangs, with its session and what descends from it; its failure is then
        the next that `check` finds.

        Before that, every thread's stack goes into the log.
        """
        child = next((it for it in self.children if it.pid == hang.watched.pid), None)
        if child is None or child.exit_code() is not None:
            return
        # A stopped one handles nothing.
        deaf = {entry.pid for entry in stopped_processes()}
        asked = [
            entry
            for entry in self._below(child)
            if entry.pid not in deaf and catches(entry.pid, signal.SIGUSR1)
        ]
        for entry in asked:
            signal_process(entry.pid, signal.SIGUSR1)
        if asked:
            time.sleep(_STACK_SECONDS)
        for entry in self._below(child):
            signal_process(entry.pid, signal.SIGKILL)
        stacks = "the stacks of its threads stand in its log" if asked else "its log"
        message = f"{hang.text}; {stacks} ({child.spec.log})"
        self._hangs[child.pid] = ChildSilent(child.spec.name, message, hang.cause)
        deadline = time.monotonic() + KILL_SECONDS
        while child.exit_code() is None and time.monotonic() < deadline:
            self.pause()

    def _below(self, child: Child) -> list[ProcessEntry]:
        """The child, its session and what descends from it."""
        processes = living_processes()
        below = {child.pid} | {entry.pid for entry in descendants(child.pid, processes)}
        return [it for it in processes if it.session == child.pid or it.pid in below]

    def failure_of(self, child: Child, code: int) -> ProcessFailed:
        """Why a child ended that should run."""
        if error := self._hangs.get(child.pid) or child.failure:
            return error
        self._sync_logs()
        before, self._memory_kills = self._memory_kills, memory_kills()
        has_run_out = before is not None and (self._memory_kills or 0) > before
        return ChildFailed(child, code, LastMemory(self._held_bytes.get(child.pid, 0), has_run_out))

    def note_memory(self) -> None:
        """Look how much memory each child holds with what is below it; asked every second."""
        processes = living_processes()
        for child in self.children:
            below = [entry.pid for entry in descendants(child.pid, processes)]
            held = sum(resident_bytes(pid) for pid in (child.pid, *below))
            # Nothing of a process that has just ended.
            self._held_bytes[child.pid] = held or self._held_bytes.get(child.pid, 0)

    def replace(
        self, name: str, spec: ProcessSpec | None, *, wait_seconds: float, ready_seconds: float
    ) -> None:
        """Start `spec` in the place of the child `name`, which failed, while the others continue;
        None leaves the place empty, and closes its port.

        What is left of the child is killed at once. The replacement starts after `wait_seconds` in
        `check`, which does not wait for it: it fails there where it is not ready in time.
        """
        child = next(it for it in self.children if it.spec.name == name)
        self._hangs.pop(child.pid, None)
        position = self.bury(child)
        if spec is None:
            if (listener := self._listeners.pop(name, None)) is not None:
                listener.close()
            return
        at = time.monotonic() + wait_seconds
        self._restarts_due.append(_Restart(at, position, spec, ready_seconds))

    def is_replaced(self, name: str) -> bool:
        due = any(it.spec.name == name for it in self._restarts_due if it.ready_seconds is not None)
        return due or any(child.spec.name == name for child in self._replacements())

    def serving(self, *, besides: str) -> list[str]:
        """The names of the other children that listen, live and are ready."""
        ready = [it for it in self.children if ready_content(it.spec) is not None]
        living = [it.spec for it in ready if it.exit_code() is None and it.spec.name != besides]
        return [it.name for it in living if it.listens is not None]

    def unfinished(self) -> list[ProcessSpec]:
        """Those that finish by themselves and have not ended, or will be started again."""
        running = [child.spec for child in self.children if child.exit_code() is None]
        return [it for it in (*running, *(due.spec for due in self._restarts_due)) if it.finishes]

    def _replacements(self) -> list[Child]:
        """Children that replace others and are not ready yet; ChildNotReady when one is late."""
        waiting = [child for child in self.children if child.pid in self._not_ready_again]
        for child in waiting:
            if ready_content(child.spec) is not None:
                del self._not_ready_again[child.pid]
            elif child.exit_code() is None and child.seconds() > self._not_ready_again[child.pid]:
                self._sync_logs()
                raise ChildNotReady(child, self._not_ready_again[child.pid])
        return [child for child in waiting if child.pid in self._not_ready_again]

    def companions(self) -> list[Child]:
        """Children that the others continue without; dead ones stay until the next `check`."""
        return [child for child in self.children if child.spec.is_companion]

    def stop_companions(self, *, timeout_seconds: float, is_urgent: Callable[[], bool]) -> None:
        """Ask the companions, the last ones that run, to finish, and wait so long for them."""
        companions = self.companions()
        for child in companions:
            if child.exit_code() is None:
                signal_process(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and not is_urgent():
            if all(child.exit_code() is not None for child in companions):
                return
            self.pause()

    def pause(self) -> None:
        time.sleep(POLL_SECONDS)

    def _sync_logs(self) -> None:
        """What a child said must stand in its log before that is read."""
        if self._logs is not None:
            self._logs.sync()

    def stop(
        self, *, is_urgent: Callable[[], bool] = lambda: False, keeps_companions: bool = False
    ) -> None:
        """End every child and everything below it: TERM to all, then KILL to what is left.

        With `keeps_companions` those continue, with everything in their sessions.

        Returns when no descendant is alive; raises ProcessError when one cannot be killed.
        `is_urgent` is asked often; once true, the time to end by themselves is over.
        """
        while self._listeners:
            self._listeners.popitem()[1].close()
        if self._elsewhere is not None:
            self._elsewhere.stop()
        kept = self.companions() if keeps_companions else []
        ending = [child for child in self.children if child not in kept]
        if not ending:
            self._close_logs(kept)
            return
        told: set[tuple[int, int]] = set()
        deadline = time.monotonic() + self._stop_timeout_seconds
        while owned := self.owned(kept):
            for entry in self._to_terminate(owned):
                if (entry.pid, entry.start_time) not in told:
                    signal_process(entry.pid, signal.SIGTERM)
                    told.add((entry.pid, entry.start_time))
            if time.monotonic() >= deadline or is_urgent():
                break
            self.pause()
        self._kill_all(kept)
        if self._elsewhere is not None:
            self._elsewhere.wait_stopped(is_urgent=is_urgent)
        for child in ending:
            child.bury()
        self.children[:] = kept
        if self._temporary is not None and not kept:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        self._close_logs(kept)
        self._write_registry(self.children)

    def _close_logs(self, kept: Sequence[Child]) -> None:
        """What was said stands in the logs; they stay open for companions that continue."""
        self._sync_logs()
        if self._logs is not None and not kept:
            self._logs.close()
            self._logs = None

    def owned(self, kept: Sequence[Child] = ()) -> list[ProcessEntry]:
        """Every living process that descends from a child, also when it was orphaned; but not
        those of the children that are `kept`."""
        roots = {child.pid for child in self.children} | {e.pid for e in self._adopted()}
        owned = belonging_to(roots, self._mark)
        if not kept:
            return owned
        sessions = {child.pid for child in kept}
        processes = living_processes()
        spared = {entry.pid for pid in sessions for entry in descendants(pid, processes)}
        return [e for e in owned if e.session not in sessions and e.pid not in spared | sessions]

    def _adopted(self) -> list[ProcessEntry]:
        """Orphans of our children, which the kernel gave to us; see `become_subreaper`.

        Each child has its own session, so what comes from below it is never in ours, where
        whatever else this process started is.
        """
        own = {child.pid for child in self.children}
        return [
            entry
            for entry in children_in_other_sessions()
            if entry.pid not in own and (entry.pid, entry.start_time) not in self._strangers
        ]

    def _listener(self, spec: ProcessSpec) -> socket.socket | None:
        """The bound socket that every process of this name inherits."""
        if spec.listens is not None and spec.name not in self._listeners:
            where = spec.listens
            self._listeners[spec.name] = bind(
                where.host, where.port, allow_public_bind=where.allow_public_bind
            )
        return self._listeners.get(spec.name)

    def _temporary_variables(self, spec: ProcessSpec) -> dict[str, str]:
        if spec.temporary_variable is None:
            return {}
        if self._temporary is None:
            name = self._registry.parent.name[:NUM_NAME_CHARACTERS]
            self._temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{name}-"))
        return {spec.temporary_variable: str(self._temporary)}

    def reap_orphans(self) -> None:
        """Reap dead orphans that the kernel gave to us; see `become_subreaper`."""
        own = {child.pid for child in self.children}
        for entry in zombie_children(os.getpid()):
            if entry.pid not in own and (entry.pid, entry.start_time) not in self._strangers:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)

    def _plan_restart(self, child: Child, error: ProcessFailed) -> None:
        """Reap a dead child, kill what it left in its session, and note when to restart it."""
        spec, position, now = child.spec, self.bury(child), time.monotonic()
        recent = self._recent_restarts(spec.name)
        num_lately = sum(at > now - LATELY_SECONDS for at in recent)
        wait = min(MOST_RESTART_WAIT_SECONDS, RESTART_WAIT_SECONDS * 4.0 ** min(num_lately, 9))
        recent.append(now)
        self._restarts_due.append(_Restart(now + wait, position, spec))
        self._ended[spec.name] = {"pid": child.pid, "from_outside": error.fault.is_from_outside}
        self._write_registry(self.children)
        number = f"restart {len(recent)} of {spec.restarts}"
        self._on_restart(f"{error}; {number} in {wait:g} s")

    def bury(self, child: Child) -> int:
        """Reap a dead child, kill what it left in its session, and remove its ready file.

        Returns its place among the children.
        """
        for entry in self._left_behind(child):
            signal_process(entry.pid, signal.SIGKILL)
        child.bury()
        if child.spec.ready_file is not None:
            child.spec.ready_file.unlink(missing_ok=True)
        self._not_ready_again.pop(child.pid, None)
        position = self.children.index(child)
        self.children.remove(child)
        return position

    def _has_restarts_left(self, child: Child) -> bool:
        return len(self._recent_restarts(child.spec.name)) < child.spec.restarts

    def _recent_restarts(self, name: str) -> list[float]:
        """When a child was restarted in the last `RESTART_WINDOW_SECONDS`; the list itself."""
        since = time.monotonic() - RESTART_WINDOW_SECONDS
        recent = [at for at in self._restarted_at.get(name, []) if at > since]
        self._restarted_at[name] = recent
        return recent

    def _left_behind(self, dead: Child) -> list[ProcessEntry]:
        """The session of a dead child, and orphans that no living child's session holds."""
        processes = living_processes()
        living = {child.pid for child in self.children if child is not dead}
        orphans = [entry for entry in self._adopted() if entry.session not in living]
        below = [entry for orphan in orphans for entry in descendants(orphan.pid, processes)]
        return [entry for entry in processes if entry.session == dead.pid] + orphans + below

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [restart for restart in self._restarts_due if restart.at <= now]
        for restart in due:
            self._restarts_due.remove(restart)
            # The position says who is blamed first when several fail at once.
            child = self.start(restart.spec)
            self.children.remove(child)
            self.children.insert(restart.position, child)
            if restart.ready_seconds is not None:
                self._not_ready_again[child.pid] = restart.ready_seconds

    def _failed(self) -> tuple[Child, int] | None:
        # Whoever waits for one that hung ends soon after it.
        for child in sorted(self.children, key=lambda it: it.pid not in self._hangs):
            if child.spec.is_companion:
                continue
            code = child.exit_code()
            # Also one that was not ready a moment ago, and was, and ended, since.
            has_finished = code == 0 and child.spec.finishes and is_done(child.spec)
            if code is not None and not has_finished:
                return child, code
        return None

    def _to_terminate(self, owned: Sequence[ProcessEntry]) -> list[ProcessEntry]:
        """The groups of the children, and orphans; others are ended by their parent."""
        living = [child for child in self.children if child.exit_code() is None]
        alone = {child.pid for child in living if child.spec.ends_its_children}
        sessions = {child.pid for child in self.children} - alone
        parents = {entry.pid for entry in owned}
        return [
            entry
            for entry in owned
            if entry.pid in alone or entry.session in sessions or entry.parent not in parents
        ]

    def _kill_all(self, kept: Sequence[Child] = ()) -> None:
        deadline = time.monotonic() + KILL_SECONDS
        while owned := self.owned(kept):
            if time.monotonic() >= deadline:
                pids = ", ".join(str(entry.pid) for entry in owned)
                raise ProcessError(f"processes {pids} of this run do not end even when killed")
            for entry in owned:
                signal_process(entry.pid, signal.SIGKILL)
            self.pause()

    def _write_registry(self, children: Sequence[Child]) -> None:
        if self._has_listed and launch_of(self._registry) not in (None, self._mark):
            return  # another launcher has taken the run over
        self._has_listed = True
        processes = [
            {"name": child.spec.name, "pid": child.pid, "start_time": child.start_time}
            for child in children
            if isinstance(child, ChildHere)
        ]
        temporary = None if self._temporary is None else str(self._temporary)
        content = {"launch": self._mark, "processes": processes, "ended": self._ended}
        with contextlib.suppress(OSError):  # it only helps the next launch
            write_json(self._registry, {**content, "temporary_folder": temporary})


def become_subreaper() -> None:
    """Make orphaned descendants our children, so that we see, end and reap them (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _spawn(
    spec: ProcessSpec, env: Mapping[str, str], passed: Sequence[int], logs: LogWriter | None
) -> subprocess.Popen[bytes]:
    try:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if logs is not None:
            output, told = logs.open(spec.log, spec.name, env)
        else:
            output, told = os.open(spec.log, LOG_FLAGS, 0o600), {}
        with open(output, "wb") as log:
            return subprocess.Popen(
                spec.argv,
                env={**env, **told},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                start_new_session=True,
                # A tracker may write into a folder of a team; the others write for this user.
                umask=-1 if spec.is_companion else 0o077,
            )
    except OSError as error:
        raise ProcessError(
            f"{spec.name} cannot be started: {error.strerror}: {error.filename} (log: {spec.log})"
        ) from error

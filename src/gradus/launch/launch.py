"""One launch on this machine: start the processes of a job, show its progress, end all of them."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from gradus.errors import CorruptStateError, DeadlineError, ExitCode, GradusError
from gradus.files import DISK_ERRORS, free_bytes, storage_error, write_atomically, write_json
from gradus.launch.console import ConsoleProgress, View
from gradus.launch.job import PICKLED, Job
from gradus.launch.machine import MachineLog
from gradus.launch.restarts import Decision, Restarts
from gradus.launch.resume import Preparation, ResumePoint
from gradus.launch.summary import Phases
from gradus.plan.processes import JOINING, LaunchPlan, config_file, describe_processes
from gradus.processes.liveness import SilenceWatch, Watched, watched
from gradus.processes.log_writer import LogWriter
from gradus.processes.started import (
    Child,
    NodeLost,
    OtherNodes,
    ProcessFailed,
    ProcessSpec,
    last_words,
)
from gradus.processes.supervisor import Supervisor, become_subreaper
from gradus.run.checkpoints import CheckpointStore
from gradus.run.growing_files import audit
from gradus.run.lease import RunLease, choose_opener, run_path
from gradus.run.model_files import published_models
from gradus.run.paths import RunDirectory
from gradus.run.ready import make_tokens, note_left_out
from gradus.run.recording import note_launched

FINISH_SECONDS = 600.0
"""Deadline for the last process to finish after the first one did."""

_HURRIED_SECONDS = 2.0
"""For trackers, when whoever stops the run will soon kill it."""

_RESTART_FLUSH_SECONDS = 10.0
"""For trackers before a restart, which sends what is left."""

_LEASE_SECONDS = 1.0
_LEAST_FREE_BYTES = 1 << 20
_DRY = "dry run: nothing was written and nothing started"


def launch(
    job: Job,
    stream: TextIO | None = None,
    *,
    resume: bool = False,
    clean: bool = False,
    dry_run: bool = False,
) -> int:
    """Run a job to its end; with `dry_run` only say what would happen. Returns the exit code.

    0 when done, 130 after Ctrl-C, 75 after SIGTERM or when episodes of an evaluation failed. A
    process that fails ends all others; then all start again, or, where `Restarts` says so, it is
    raised as a GradusError whose message names it, its cause and its log. Nothing in the run
    directory changes before everything that may refuse the job was asked.
    """
    become_subreaper()
    out = stream or sys.stdout
    console = ConsoleProgress(out)
    open_run = choose_opener(resume=resume, clean=clean, dry_run=dry_run)
    if not dry_run:
        job.check()
    # What cannot be planned must neither cost the old run nor leave a new folder.
    job.plan(RunDirectory(run_path(job.output_dir, job.name)), 0, None)
    lease = open_run(job.output_dir, job.name, kind=job.kind)
    try:
        point = job.workload.resume_point(lease) if resume else None
        console.lines([f"{job.workload.title:<18}{lease.run_dir.root}", *job.notes])
        plan, preparation = _planned(job, lease, point)
        console.lines(preparation.lines)
        if preparation.is_finished:
            return ExitCode.DONE
        if dry_run:
            console.lines([*describe_processes(plan), _DRY])
            return ExitCode.DONE
        if point is not None:
            lease.claim()
        console.lines(_changed_files(job, lease.run_dir) if resume else [])
        preparation.apply()
        _prepare(lease.run_dir, plan)
        for name, text in job.files.items():
            write_atomically(lease.run_dir.from_python / name, text.encode())
        if job.written is not None:
            note_launched(
                *(lease.run_dir, job.kind, job.written.without_secrets(), job.chosen),
                written=job.written.without_secrets(only_written=True),
                term=lease.term,
                environments=plan.environments,
            )
        # A bench, a replay, and training that saves nothing have nothing to continue from.
        is_allowed = job.saves or job.kind == "eval"
        restarts = Restarts(job.launch, is_allowed=is_allowed, is_resumed=point is not None)
        result: int | LaunchPlan = plan
        with Interrupts() as interrupts, job.open_nodes(plan, lease) as nodes:
            common = _Common(job, lease, interrupts, restarts, Phases(), nodes)
            while isinstance(result, LaunchPlan):
                result = _Attempt(common, result, job.workload.view(out, lease)).run()
            return result
    finally:
        lease.release()


def _planned(
    job: Job, lease: RunLease, point: ResumePoint | None
) -> tuple[LaunchPlan, Preparation]:
    """What starts in the term of the lease, and what must be cleared for it; changes nothing."""
    plan = job.plan(lease.run_dir, lease.term, point.step if point else None)
    return plan, job.workload.prepare(lease, plan, point)


def _changed_files(job: Job, run_dir: RunDirectory) -> list[str]:
    """A line for each file of a call in Python that a resumed run has in another form."""
    shown = [name for name in job.files if not name.endswith(PICKLED)]
    kept = {name: run_dir.from_python / name for name in shown}
    changed = [
        path
        for name, path in kept.items()
        if not path.is_file() or path.read_text("utf-8") != job.files[name]
    ]
    return [f"{'changed':<18}{path} is another than before" for path in changed]


def _prepare(run_dir: RunDirectory, plan: LaunchPlan) -> None:
    for stem, config in plan.configs.items():
        write_json(config_file(run_dir, stem), config.without_secrets())
    for folder in (run_dir.ready, run_dir.logs):
        folder.mkdir(mode=0o700, exist_ok=True)
    run_dir.save_request.unlink(missing_ok=True)
    specs = (spec for stage in plan.stages for spec in stage)
    if JOINING in plan.configs and run_dir.admin_token.exists():
        return  # servers that others started know them
    is_served = any(spec.name.partition("_")[0] == "inference" for spec in specs)
    if is_served or JOINING in plan.configs:
        make_tokens(run_dir)


@dataclass
class _Common:
    """What all attempts of a launch share."""

    job: Job
    lease: RunLease
    interrupts: Interrupts
    restarts: Restarts
    phases: Phases
    nodes: OtherNodes | None


class _Attempt:
    """One attempt of a launch, from the first process to the summary or to the next attempt."""

    def __init__(self, common: _Common, plan: LaunchPlan, view: View) -> None:
        self._job, self._lease = job, lease = common.job, common.lease
        self._plan, self._view = plan, view
        self._interrupts = common.interrupts
        self._restarts = common.restarts
        self._phases, self._nodes = common.phases, common.nodes
        self._began_at = view.num_done()
        self._lease_checked_at, self._is_disk_full = time.monotonic(), False
        self._replaced_at: dict[str, int] = {}  # name → steps that were finished
        self._silence = SilenceWatch(lease.run_dir.alive, hang_seconds=job.launch.hang_seconds)
        self._supervisor = Supervisor(
            lease.run_dir.processes,
            stop_timeout_seconds=job.launch.stop_timeout_seconds,
            on_restart=view.line,
            logs=LogWriter(job.logs_of_run),
            elsewhere=common.nodes,
        )

    def run(self) -> int | LaunchPlan:
        """Start, follow, stop, sum up: the exit code, or what the next attempt starts.

        Raises what went wrong where no other attempt follows.
        """
        try:
            with MachineLog(self._lease, self._supervisor):
                return self._run()
        finally:
            self._end_companions()

    def _run(self) -> int | LaunchPlan:
        try:
            self._start()
            self._follow()
        except Interrupted as interrupted:
            return self._end_interrupted(interrupted)
        except (GradusError, OSError) as error:
            self._stop()
            if isinstance(error, OSError) and error.errno not in DISK_ERRORS:
                raise
            return self._restart(error)
        except BaseException:
            self._stop()
            raise
        self._stop()
        for outcome, path in self._lease.run_dir.good_ends.items():
            if path.is_file():
                reason = path.read_text().strip()
                self._view.line(reason)
                return self._sum_up(outcome, reason)
        return self._sum_up("done", None)

    def _end_interrupted(self, interrupted: Interrupted) -> int:
        is_saving = self._interrupts.is_from_outside or self._job.saves_when_interrupted
        is_saving &= self._job.saves
        if is_saving and self._phases.is_working:
            self._save()
        self._stop()
        if self._job.saves:
            # Only now: one step more may have been saved while the processes ended.
            self._say_what_is_saved()
        self._sum_up("interrupted", str(interrupted))
        return interrupted.exit_code

    def _restart(self, error: GradusError | OSError) -> int | LaunchPlan:
        """The plan of the next attempt after a failure; raises it where it is the end."""
        if isinstance(error, OSError):
            error = storage_error(error, self._lease.run_dir.root)
        try:
            if plan := self._next_plan(error):
                return plan
        except Interrupted as interrupted:
            return self._end_interrupted(interrupted)
        except GradusError as refusal:
            # What keeps the run from continuing is the reason that a person can act on.
            error = refusal
        except OSError as lost:
            error = storage_error(lost, self._lease.run_dir.root)
        self._view.lines(last_words(error))
        # Of checkpoints that are all damaged nothing can be said but that.
        says = self._job.saves and self._restarts.was_ready
        if says and not isinstance(error, CorruptStateError):
            self._say_what_is_saved()
        self._sum_up("failed", str(error))
        raise error

    def _next_plan(self, error: GradusError) -> LaunchPlan | None:
        """Wait, and clear what the failure left; None where no attempt follows, Interrupted when
        somebody asks to end before or meanwhile."""
        self._interrupts.check()  # who asks all to end may reach others first
        decision = self._decide(error)
        if decision.wait_seconds is None:
            self._view.lines([decision.told] if decision.told else [])
            return None
        until = time.monotonic() + decision.wait_seconds
        point = self._point_after(error)
        where = self._view.continued(point.step or 0)
        self._view.line(f"{error}; {decision.told} {where}")
        self._end_companions(is_restart=True)
        while time.monotonic() < until:
            self._interrupts.check()
            self._supervisor.pause()
        self._lease.renew()
        plan, preparation = _planned(self._job, self._lease, point)
        preparation.apply()
        _prepare(self._lease.run_dir, plan)
        self._phases.begin_again()
        self._restarts.begin()
        return plan

    def _save(self) -> None:
        """Ask the trainer for a checkpoint and wait for it, while it can still come."""
        checkpoints = CheckpointStore(self._lease.run_dir, self._lease.term)
        before = checkpoints.newest_step()
        savers = [it.name for it in self._supervisor.unfinished()]
        absent = next(filter(self._supervisor.is_replaced, savers), None)
        why = f"while {absent} starts again"
        if absent is None:
            write_atomically(self._lease.run_dir.save_request, b"")
            seconds = self._job.launch.save_timeout_seconds
            self._view.line(
                f"asked to stop: waits {seconds:g} s at most for a checkpoint; a second signal "
                "ends it"
            )
            why = self._wait_for_save(lambda: checkpoints.newest_step() != before, seconds)
        if not why:
            self._view.line(f"checkpoint {checkpoints.newest_step()} is saved; the run ends")
            return
        self._view.line(f"no checkpoint was saved {why}")

    def _wait_for_save(self, is_saved: Callable[[], bool], seconds: float) -> str:
        """Why no checkpoint came; "" when it did."""
        num_unfinished = len(self._supervisor.unfinished())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._interrupts.is_urgent:
            if is_saved():
                return ""
            try:
                self._supervisor.check()  # what serves those that save may start again meanwhile
            except ProcessFailed as error:
                return f"because {error}"
            if len(self._supervisor.unfinished()) < num_unfinished:
                break
            self._supervisor.pause()
        return "in time"

    def _say_what_is_saved(self) -> None:
        run_dir = self._lease.run_dir
        try:
            newest = CheckpointStore(run_dir, self._lease.term).newest_step()
        except OSError:
            return  # a disk that is gone is no second cause of the end
        if newest is not None:
            self._view.line(f"--resume continues {self._view.continued(newest)}")
            return
        self._view.line("no checkpoint was saved yet; --resume starts again at step 1")
        published = published_models(run_dir)
        if published:
            self._view.line(
                f"the weights after {max(published)} steps lie in {published[max(published)]}; "
                f"gradus export {shlex.quote(str(run_dir.root))} DIRECTORY takes them"
            )

    def _start(self) -> None:
        if self._nodes is not None:
            seconds = self._job.launch.ready_timeout_seconds
            wanted, tell = self._plan.other_nodes, self._view.line
            self._nodes.wait_joined(wanted, seconds, on_wait=self._on_wait, tell=tell)
        for stage in self._plan.stages:
            left_out = self._note_left_out()
            awaited = [it for it in stage if not it.is_companion and it.name not in left_out]
            self._view.console.started([spec.name for spec in awaited])
            children = [self._supervisor.start(spec) for spec in awaited]
            for spec in stage:
                if spec.is_companion:
                    self._supervisor.start(spec)
            self._supervisor.wait_ready(
                children,
                timeout_seconds=self._job.launch.ready_timeout_seconds,
                on_ready=self._note_ready,
                on_wait=self._on_wait,
            )
        self._phases.ready = time.monotonic()

    def _follow(self) -> None:
        """Return when every finishing process has ended with exit code 0."""
        num_finishing = sum(spec.finishes for stage in self._plan.stages for spec in stage)
        first_end: float | None = None
        while (running := self._supervisor.unfinished()) or self._replaces_failed():
            self._replaces_failed()
            self._on_wait()
            if 0 < len(running) < num_finishing:
                if first_end is None:
                    first_end = time.monotonic()
                    if self._job.evaluation_seconds:
                        # It may take long, and shows nothing until it is complete.
                        names = ", ".join(spec.name for spec in running)
                        self._view.line(f"training is done; {names} still evaluates")
                self._refuse_to_wait_longer(running, first_end)
            self._supervisor.pause()

    def _replaces_failed(self) -> bool:
        """Whether a process failed and is replaced; raises the failure where all must start again,
        or nothing may."""
        try:
            self._supervisor.check()
        except ProcessFailed as error:
            name = error.fault.process
            if self._continues_without(error):
                return True
            # One that fails again before it was ready, or by itself at the same step, needs more
            # than a start.
            if self._supervisor.is_replaced(name):
                raise
            self._view.show()  # what was finished decides
            step = self._view.num_done()
            if error.fault.kind == "exit" and self._replaced_at.get(name) == step:
                raise
            replacement, where = self._replacement(error)
            if replacement is None:
                raise
            decision = self._decide(error)
            if decision.wait_seconds is None:
                raise
            self._lease.check()
            self._replaced_at[name] = step
            self._view.line(f"{error}; {decision.told}, of {name} alone{where}")
            self._restarts.begin()
            self._supervisor.replace(
                name,
                replacement,
                wait_seconds=decision.wait_seconds,
                ready_seconds=self._job.launch.ready_timeout_seconds,
            )
            return True
        return False

    def _continues_without(self, error: ProcessFailed) -> bool:
        """Whether another inference server serves while this one starts again, or stays out."""
        name = error.fault.process
        spec = self._plan.spec(name)
        is_server = spec.listens is not None and spec.is_replaceable
        is_server &= not isinstance(error, NodeLost)
        if not is_server or not self._supervisor.serving(besides=name):
            return False
        decision = self._restarts.after_replica(error, num_replicas=len(self._plan.servers))
        if decision is None:
            return False
        self._lease.check()
        self._view.line(f"{error}; {decision.told}")
        self._note_left_out()
        self._supervisor.replace(
            name,
            None if decision.wait_seconds is None else spec,
            wait_seconds=decision.wait_seconds or 0.0,
            ready_seconds=self._job.launch.ready_timeout_seconds,
        )
        return True

    def _note_left_out(self) -> set[str]:
        """The replicas that stay out; whoever asks replicas finds them in the run's folder."""
        note_left_out(self._lease.run_dir, self._plan.servers, self._restarts.left_out)
        return self._restarts.left_out

    def _stands(self, error: ProcessFailed) -> bool:
        """Whether another orchestrator can continue: it did not end by itself, nor was ending."""
        run_dir = self._lease.run_dir
        is_ended = error.fault.kind in ("signal", "silence")
        stands = run_dir.standing_file(self._lease.term).is_file()
        return is_ended and stands and not run_dir.end_of_batches.exists()

    def _replacement(self, error: ProcessFailed) -> tuple[ProcessSpec | None, str]:
        """What starts in the place of a process that failed, and from where, for a person; None
        where all start again."""
        name = error.fault.process
        spec = self._plan.spec(name)
        if not spec.is_replaceable or isinstance(error, NodeLost):
            return None, ""
        if name == "orchestrator":
            return (spec if self._stands(error) else None), ", where it stood"
        if name != "trainer":
            return spec, ""
        point = self._point_after(error)
        if not point.has_batches(self._lease.run_dir):
            return None, ""
        plan = self._job.plan(self._lease.run_dir, self._lease.term, point.step)
        return plan.spec(name), f", {self._view.continued(point.step or 0)}"

    def _decide(self, error: GradusError) -> Decision:
        step, was_ready = self._view.num_done(), self._phases.ready is not None
        return self._restarts.after(error, began_at=self._began_at, step=step, was_ready=was_ready)

    def _refuse_to_wait_longer(self, running: list[ProcessSpec], since: float) -> None:
        limit = FINISH_SECONDS + self._job.evaluation_seconds
        if time.monotonic() - since < limit:
            return
        spec = running[0]
        raise DeadlineError(
            f"{spec.name} still runs {limit:g} s after the others finished (log: {spec.log})"
        )

    def _on_wait(self) -> None:
        self._interrupts.check()
        self._view.console.waiting()
        self._view.show()
        looked = self._silence.look(self._watched())
        self._view.lines(looked.lines)
        self._view.lines([] if self._nodes is None else self._nodes.lines())
        for hang in looked.hangs:
            self._supervisor.end_hung(hang)
        if time.monotonic() - self._lease_checked_at >= _LEASE_SECONDS:
            self._lease_checked_at = time.monotonic()
            self._lease.check()
            self._note_full_disk()
            self._supervisor.note_memory()
            self._supervisor.reap_orphans()

    def _note_full_disk(self) -> None:
        """The processes wait for room and say so only in their logs."""
        root = self._lease.run_dir.root
        free = free_bytes(root)
        is_full = free is not None and free < _LEAST_FREE_BYTES
        if is_full and not self._is_disk_full:
            self._view.line(f"the disk of {root} is full: make room, the run waits for it")
        self._is_disk_full = is_full

    def _note_ready(self, child: Child, content: Mapping[str, Any]) -> None:
        address = content.get("base_url") or content.get("run_address") or ""
        self._view.console.ready(child.spec.name, child.seconds(), str(address))

    def _stop(self) -> None:
        self._phases.stopping = self._phases.stopping or time.monotonic()
        self._supervisor.stop(is_urgent=lambda: self._interrupts.is_urgent, keeps_companions=True)
        self._supervisor.reap_orphans()
        self._view.end()

    def _point_after(self, error: GradusError) -> ResumePoint:
        """From where to continue; where nothing can, the first failure is told before the second is
        raised."""
        try:
            self._lease.check()
            return self._job.workload.resume_point(self._lease)
        except GradusError:
            self._view.line(str(error))
            raise

    def _end_companions(self, *, is_restart: bool = False) -> None:
        """The tracker reads how the run ended and sends what is left, if there is time for it."""
        if not self._supervisor.companions():
            return
        seconds = self._plan.flush_seconds
        if is_restart:
            seconds = min(seconds, _RESTART_FLUSH_SECONDS)
        # Whoever stops a run from outside, a scheduler for example, soon kills it.
        if self._interrupts.is_from_outside:
            seconds = _HURRIED_SECONDS
        before = self._interrupts.count
        self._supervisor.stop_companions(
            timeout_seconds=seconds, is_urgent=lambda: self._interrupts.count > before
        )
        left = [c.spec for c in self._supervisor.companions() if c.exit_code() is None]
        self._supervisor.stop(is_urgent=lambda: True)
        self._supervisor.reap_orphans()
        self._view.end()
        root = shlex.quote(str(self._lease.run_dir.root))
        for spec in () if is_restart else left:
            self._view.line(
                f"{spec.name} did not finish in {seconds:g} s; --resume sends the rest, or "
                f"gradus view {root} --to TRACKER (log: {spec.log})"
            )

    def _sum_up(self, outcome: str, cause: str | None) -> int:
        self._lease.check()  # what stands there may be of the next owner
        seconds = self._phases.seconds()
        audit(self._lease.run_dir, "ended", outcome=outcome, cause=cause)
        return self._view.sum_up(outcome, cause, seconds, self._restarts.causes)

    def _watched(self) -> list[Watched]:
        return [watched(it.spec, it.pid) for it in self._supervisor.children if it.spec.node == 0]


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The launch was asked to end."""

    def __init__(self, number: int) -> None:
        self.exit_code = 130 if number == signal.SIGINT else int(ExitCode.TRY_AGAIN)
        what = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {what}")


class Interrupts:
    """Holds the handlers of SIGINT, SIGTERM and SIGHUP inside a `with` block.

    >>> with Interrupts() as interrupts:
    ...     interrupts.check()
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self._received:
            raise Interrupted(self._received[0])

    @property
    def is_from_outside(self) -> bool:
        """Whether a scheduler or the system asks to end, and not a person at the terminal."""
        return bool(self._received) and self._received[0] != signal.SIGINT

    @property
    def count(self) -> int:
        return len(self._received)

    @property
    def is_urgent(self) -> bool:
        """Whether a second signal came, after which nothing is waited for."""
        return len(self._received) > 1

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received.append(number)

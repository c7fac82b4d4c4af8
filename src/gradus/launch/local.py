"""Runs on this machine: start the processes of a plan, show their progress, end all of them."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from gradus.config import LaunchConfig, RunConfig, SftConfig, run_name, without_secrets
from gradus.errors import DeadlineError, GradusError
from gradus.files import free_bytes, write_atomically, write_json
from gradus.launch.interrupts import Interrupted, Interrupts
from gradus.launch.plan import (
    LaunchPlan,
    Machine,
    config_file,
    describe,
    plan_bench,
    plan_rl,
    plan_sft,
)
from gradus.launch.progress import Progress
from gradus.launch.resume import (
    ResumePoint,
    changed_settings,
    clear_for_resume,
    find_resume_point,
    refuse_other_evaluation,
)
from gradus.launch.served_models import check_served_models
from gradus.launch.summary import PhaseSeconds, Summary
from gradus.launch.tail import LineTail, MetricsTail, Record, iter_records
from gradus.monitor.console import BENCH_COLUMNS, RL_COLUMNS, SFT_COLUMNS, Column
from gradus.processes.liveness import SilenceWatch, Watched
from gradus.processes.supervisor import Child, Supervisor, become_subreaper, last_words
from gradus.run.checkpoints import CheckpointStore
from gradus.run.lease import RunKind, RunLease, choose_opening, run_path
from gradus.run.paths import RunDirectory
from gradus.run.recording import note_launch

FINISH_SECONDS = 600.0
"""Deadline for the last process to finish after the first one did."""

_LEASE_SECONDS = 1.0
_LEAST_FREE_BYTES = 1 << 20
_EXIT_DONE = 0


@dataclass(frozen=True)
class Job:
    """What a launch needs to know beyond its plan."""

    kind: RunKind
    name: str
    output_dir: Path
    max_steps: int
    launch: LaunchConfig
    columns: tuple[Column, ...]
    plan: Callable[[RunDirectory, int, int | None], LaunchPlan]
    """Run directory, term, step of the checkpoint to go on from → the plan."""
    before_start: Callable[[RunLease], None] = lambda _: None
    """Writes what the job leaves in the run directory besides its configs."""
    evaluation_seconds: float = 0.0
    """Time that evaluations at the end may take."""
    saves: bool = False
    """Whether a stop from outside waits for a checkpoint."""
    keeps_versions: bool = False
    """Whether versions that were published before a kill are still needed after it."""


def run_rl(
    config: RunConfig, *, resume: bool = False, clean: bool = False, dry_run: bool = False
) -> int:
    """One reinforcement-learning run, to its end; returns the exit code.

    0 when done, 130 after Ctrl-C, 75 after SIGTERM. A process that fails ends all others and is
    raised as a GradusError whose message names it, its cause and its log.
    """
    become_subreaper()
    if not dry_run:
        check_served_models(config, os.environ)
    evaluation = config.orchestrator.eval
    job = Job(
        kind="rl",
        name=run_name(config, secrets.token_hex(4)),
        output_dir=Path(config.output_dir),
        max_steps=config.max_steps,
        launch=config.launch,
        columns=RL_COLUMNS,
        plan=lambda run_dir, term, resume_step: plan_rl(
            config, run_dir, term, Machine.current(), resume_step=resume_step
        ),
        before_start=partial(_note_launch, config),
        saves=config.checkpoint.is_on,
        evaluation_seconds=0.0 if evaluation is None else evaluation.timeout_seconds,
    )
    return run_job(job, sys.stdout, resume=resume, clean=clean, dry_run=dry_run)


def run_sft(
    config: SftConfig, *, resume: bool = False, clean: bool = False, dry_run: bool = False
) -> int:
    """One supervised run, to its end; exit codes and errors as in `run_rl`."""
    become_subreaper()
    job = Job(
        kind="sft",
        name=run_name(config, secrets.token_hex(4)),
        output_dir=Path(config.output_dir),
        max_steps=config.max_steps,
        launch=config.launch,
        columns=SFT_COLUMNS,
        plan=lambda run_dir, term, resume_step: plan_sft(
            config, run_dir, term, Machine.current(), resume_step=resume_step
        ),
        saves=config.checkpoint.is_on,
        evaluation_seconds=all_evaluations_seconds(config),
        keeps_versions=config.eval is not None,
    )
    return run_job(job, sys.stdout, resume=resume, clean=clean, dry_run=dry_run)


def all_evaluations_seconds(config: SftConfig) -> float:
    """The most that evaluations may take when all of them wait for the end of training."""
    section = config.eval
    if section is None:
        return 0.0
    versions = range(config.max_steps + 1)
    num_due = sum(section.is_due(version, max_steps=config.max_steps) for version in versions)
    return num_due * (section.timeout_seconds + section.apply_timeout_seconds)


def run_bench(config: RunConfig) -> int:
    """The trainer of an RL run on made-up samples; exit codes and errors as in `run_rl`."""
    become_subreaper()
    bench = config.trainer.bench
    job = Job(
        kind="bench",
        name=f"bench--{Path(config.model.name).name}--{secrets.token_hex(4)}",
        output_dir=Path(config.output_dir),
        max_steps=bench.warmup_steps + bench.steps,
        launch=config.launch,
        columns=BENCH_COLUMNS,
        plan=lambda run_dir, term, _: plan_bench(config, run_dir, term, Machine.current()),
    )
    return run_job(job, sys.stdout)


def run_job(
    job: Job, stream: TextIO, *, resume: bool = False, clean: bool = False, dry_run: bool = False
) -> int:
    """Open the run directory and run the plan; with `dry_run` only say what would happen.

    Nothing in the directory changes before everything that may refuse the run was asked.
    """
    opening = choose_opening(resume=resume, clean=clean, dry_run=dry_run)
    if clean:
        # What cannot be planned must not cost the old run.
        job.plan(RunDirectory(run_path(job.output_dir, job.name)), 0, None)
    lease = opening(job.output_dir, job.name, kind=job.kind)
    try:
        progress = Progress(stream, max_steps=job.max_steps, columns=job.columns)
        point = find_resume_point(lease, job.max_steps) if resume else None
        plan = job.plan(lease.run_dir, lease.term, point.step if point else None)
        progress.line(f"{'run':<18}{lease.run_dir.root}")
        if point is not None:
            progress.lines(_resume_lines(job, lease, plan, point))
        if point is not None and point.is_finished:
            return _EXIT_DONE
        if dry_run:
            progress.lines([*describe(plan), "dry run: nothing was written and nothing started"])
            return _EXIT_DONE
        if point is not None:
            lease.claim()
            clear_for_resume(lease, point, keeps_versions=job.keeps_versions)
        _write_configs(plan, lease.run_dir)
        _prepare(lease.run_dir)
        job.before_start(lease)
        if any(spec.name == "inference" for stage in plan.stages for spec in stage):
            _write_tokens(lease.run_dir)
        with Interrupts() as interrupts:
            return _Launch(job, plan, lease, progress, interrupts).run()
    finally:
        lease.release()


def _resume_lines(job: Job, lease: RunLease, plan: LaunchPlan, point: ResumePoint) -> list[str]:
    changes: list[str] = []
    if not point.is_finished:
        changes = changed_settings(lease.run_dir, plan.configs, is_fresh=point.checkpoint is None)
        refuse_other_evaluation(lease.run_dir, plan.configs)
    return [
        f"{'resume':<18}{point.describe(job.max_steps)}",
        *(f"{'changed':<18}{change}" for change in changes),
    ]


def _write_configs(plan: LaunchPlan, run_dir: RunDirectory) -> None:
    for process, config in plan.configs.items():
        write_json(config_file(run_dir, process), without_secrets(config))


def _prepare(run_dir: RunDirectory) -> None:
    """Folders that several processes write into."""
    for folder in (run_dir.ready, run_dir.logs):
        folder.mkdir(mode=0o700, exist_ok=True)
    run_dir.save_request.unlink(missing_ok=True)


def _note_launch(config: RunConfig, lease: RunLease) -> None:
    """What a replay needs to know of this launch."""
    if config.orchestrator.recording:
        note_launch(lease.run_dir, lease.term, without_secrets(config))


def _write_tokens(run_dir: RunDirectory) -> None:
    """The tokens of the inference server's routes; they exist only as these two files."""
    run_dir.secrets.mkdir(mode=0o700, exist_ok=True)
    for token in (run_dir.admin_token, run_dir.inference_token):
        write_atomically(token, secrets.token_hex(32).encode(), mode=0o600)


@dataclass
class _Phases:
    """When each phase of a launch began, in monotonic seconds."""

    started: float = field(default_factory=time.monotonic)
    ready: float | None = None
    stopping: float | None = None

    def seconds(self) -> PhaseSeconds:
        now = time.monotonic()
        stopping = self.stopping or now
        ready = self.ready or stopping
        return PhaseSeconds(ready - self.started, stopping - ready, now - stopping)


class _Launch:
    """One launch from the first process to the summary."""

    def __init__(
        self,
        job: Job,
        plan: LaunchPlan,
        lease: RunLease,
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        self._job = job
        self._plan = plan
        self._lease = lease
        self._progress = progress
        self._interrupts = interrupts
        self._phases = _Phases()
        self._tail = MetricsTail(lease.run_dir.metrics)
        self._notices = LineTail(lease.run_dir.notices, skips_old=True)
        # What a resumed run did before counts in its summary and is not shown again.
        self._records: list[Record] = list(iter_records(self._tail))
        self._lease_checked_at = time.monotonic()
        self._is_disk_full = False
        self._silence = SilenceWatch(
            lease.run_dir.alive, limit_seconds=job.launch.silent_process_seconds
        )
        self._supervisor = Supervisor(
            lease.run_dir.processes,
            stop_timeout_seconds=job.launch.stop_timeout_seconds,
            on_restart=progress.line,
        )

    def run(self) -> int:
        """Start, follow, stop, sum up; returns the exit code or raises what went wrong."""
        try:
            self._start()
            self._follow()
        except Interrupted as interrupted:
            if interrupted.is_from_outside and self._job.saves and self._phases.ready is not None:
                self._save()
            self._stop()
            self._sum_up("interrupted", str(interrupted))
            return interrupted.exit_code
        except GradusError as error:
            self._stop()
            self._progress.lines(last_words(error))
            self._sum_up("failed", str(error))
            raise
        except BaseException:
            self._stop()
            raise
        self._stop()
        self._sum_up("done", None)
        return _EXIT_DONE

    def _save(self) -> None:
        """Ask the trainer for a checkpoint and wait for it, as long as there is time."""
        checkpoints = CheckpointStore(self._lease.run_dir, self._lease.term)
        before = checkpoints.newest_step()
        write_atomically(self._lease.run_dir.save_request, b"")
        seconds = self._job.launch.save_timeout_seconds
        self._progress.line(
            f"asked to stop: waits {seconds:g} s at most for a checkpoint; a second signal ends it"
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._interrupts.is_urgent:
            newest = checkpoints.newest_step()
            if newest != before:
                self._progress.line(f"checkpoint {newest} is saved; --resume goes on from it")
                return
            if any(child.exit_code() is not None for child in self._supervisor.children):
                break
            self._supervisor.pause()
        last = "step 1" if before is None else f"checkpoint {before}"
        self._progress.line(f"no checkpoint was saved in time; --resume goes on from {last}")

    def _start(self) -> None:
        for stage in self._plan.stages:
            self._progress.started([spec.name for spec in stage])
            children = [self._supervisor.start(spec) for spec in stage]
            self._supervisor.wait_ready(
                children,
                timeout_seconds=self._job.launch.ready_timeout_seconds,
                on_ready=self._note_ready,
                on_wait=self._on_wait,
            )
        self._phases.ready = time.monotonic()

    def _follow(self) -> None:
        """Return when every finishing process has ended with exit code 0."""
        finishing = [child for child in self._supervisor.children if child.spec.finishes]
        first_end: float | None = None
        while running := [child for child in finishing if child.exit_code() is None]:
            self._supervisor.check()
            self._on_wait()
            if len(running) < len(finishing):
                if first_end is None:
                    first_end = time.monotonic()
                    self._note_first_end(running)
                self._refuse_to_wait_longer(running, first_end)
            self._supervisor.pause()
        self._supervisor.check()

    def _note_first_end(self, running: list[Child]) -> None:
        """An evaluation at the end may take long, and shows nothing until it is complete."""
        if self._job.evaluation_seconds:
            names = ", ".join(child.spec.name for child in running)
            self._progress.line(f"training is done; {names} still evaluates")

    def _refuse_to_wait_longer(self, running: list[Child], since: float) -> None:
        limit = FINISH_SECONDS + self._job.evaluation_seconds
        if time.monotonic() - since < limit:
            return
        spec = running[0].spec
        raise DeadlineError(
            f"{spec.name} still runs {limit:g} s after the others finished (log: {spec.log})"
        )

    def _on_wait(self) -> None:
        self._interrupts.check()
        self._progress.waiting()
        self._show_steps()
        self._progress.lines(self._silence.look(watched_children(self._supervisor)))
        if time.monotonic() - self._lease_checked_at >= _LEASE_SECONDS:
            self._lease_checked_at = time.monotonic()
            self._lease.check()
            self._note_full_disk()
            self._supervisor.reap_orphans()

    def _note_full_disk(self) -> None:
        """Roles wait for room and say so in their logs alone."""
        root = self._lease.run_dir.root
        free = free_bytes(root)
        is_full = free is not None and free < _LEAST_FREE_BYTES
        if is_full and not self._is_disk_full:
            self._progress.line(f"the disk of {root} is full: make room, the run waits for it")
        self._is_disk_full = is_full

    def _note_ready(self, child: Child, content: Mapping[str, Any]) -> None:
        address = content.get("base_url") or content.get("run_address") or ""
        self._progress.ready(child.spec.name, child.seconds(), str(address))

    def _show_steps(self) -> None:
        self._progress.lines(line.decode(errors="replace") for line in self._notices.read())
        for record in self._tail.read():
            if record.is_evaluation:
                self._progress.evaluation(record)
                continue
            self._records.append(record)
            self._progress.step(record)

    def _stop(self) -> None:
        self._phases.stopping = time.monotonic()
        self._supervisor.stop(is_urgent=lambda: self._interrupts.is_urgent)
        self._supervisor.reap_orphans()
        self._show_steps()
        self._progress.end_steps()

    def _sum_up(self, outcome: str, cause: str | None) -> None:
        run_dir = self._lease.run_dir
        summary = Summary(
            kind=self._job.kind,
            run_dir=str(run_dir.root),
            term=self._lease.term,
            outcome=outcome,
            cause=cause,
            max_steps=self._job.max_steps,
            seconds=self._phases.seconds(),
            records=tuple(self._records),
        )
        self._progress.lines(summary.lines())
        try:
            write_json(run_dir.summary, summary.as_json())
        except OSError as error:
            self._progress.line(f"{run_dir.summary} cannot be written: {error.strerror}")


def watched_children(supervisor: Supervisor) -> list[Watched]:
    """The children of a launch, for the watch over silent ones."""
    return [
        Watched(child.spec.name, child.pid, is_vital=child.spec.restarts == 0)
        for child in supervisor.children
    ]

"""Runs that make steps: how they continue from a checkpoint, and how their steps are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TextIO

from gradus.errors import CorruptStateError, ExitCode, StalledError
from gradus.files import write_json
from gradus.launch.console import ConsoleProgress, View
from gradus.launch.resume import (
    Preparation,
    ResumePoint,
    changed_settings,
    clear_for_resume,
    find_resume_point,
    refuse_other_evaluation,
)
from gradus.launch.summary import PhaseSeconds, Summary, Totals
from gradus.monitor import Column
from gradus.plan.processes import LaunchPlan
from gradus.run.lease import RunKind, RunLease
from gradus.run.model_files import BestVersion, read_best
from gradus.run.paths import RunDirectory
from gradus.run.records import Place, RecordTail


@dataclass(frozen=True)
class Steps:
    """The steps of one run, from the first or from a checkpoint."""

    kind: RunKind
    max_steps: int
    columns: tuple[Column, ...]
    """What a line shows of a step."""
    keeps_versions: bool = False
    """Whether versions that were published before a kill are still needed after it."""
    note: Callable[[RunLease], None] = lambda _: None
    """Writes what the run leaves in its directory besides its configs."""

    log_every: int | None = None
    """Of so many steps one has a line; the first and the last have one. None: as the console's."""

    in_words: Callable[[str], str] = str
    """Says a line as whoever launches would."""

    title = "run"

    def resume_point(self, lease: RunLease) -> ResumePoint:
        return find_resume_point(lease, self.max_steps)

    def prepare(self, lease: RunLease, plan: LaunchPlan, point: ResumePoint | None) -> Preparation:
        """Compare this launch with the one that left the checkpoint."""
        write = partial(self._write, lease, point)
        if point is None:
            return Preparation([], write)
        changes: list[str] = []
        if point.finished_steps is None:
            is_fresh = point.checkpoint is None
            changes = changed_settings(lease.run_dir, plan.launched, is_fresh=is_fresh)
            refuse_other_evaluation(lease.run_dir, plan.launched)
        if changes:
            point = replace(point, good_end="")
        lines = [f"{'resume':<18}{point.describe(self.max_steps)}"]
        lines += [f"{'changed':<18}{change}" for change in changes]
        return Preparation(lines, write, is_finished=point.is_finished)

    def _write(self, lease: RunLease, point: ResumePoint | None) -> None:
        if point is not None:
            clear_for_resume(lease, point, keeps_versions=self.keeps_versions)
        self.note(lease)

    def view(self, stream: TextIO, lease: RunLease) -> View:
        return StepsView(self, stream, lease)


class StepsView(View):
    """A line for each step and each evaluation, and a summary in the end."""

    def __init__(self, steps: Steps, stream: TextIO, lease: RunLease) -> None:
        console = ConsoleProgress(
            stream, max_steps=steps.max_steps, columns=steps.columns, log_every=steps.log_every
        )
        super().__init__(console, lease.run_dir, steps.in_words)
        self._steps = steps
        self._lease = lease
        self._tail = RecordTail(lease.run_dir, Place())
        # What a resumed run did before counts in its summary and is not shown again.
        self._totals = Totals.of(self._tail.read())

    def show(self) -> None:
        super().show()
        for record in self._tail.read():
            self._totals.add(record)
            if record.is_evaluation:
                self.console.evaluation(record)
                continue
            self.console.step(record)

    def end(self) -> None:
        self.show()
        self.console.end_steps()

    def num_done(self) -> int:
        return self._totals.num_done

    def continued(self, checkpoint_step: int) -> str:
        where = f"checkpoint {checkpoint_step}" if checkpoint_step else "step 1"
        again = max(0, self.num_done() - checkpoint_step)
        steps = "1 step is" if again == 1 else f"{again or 'no'} steps are"
        return f"from {where}, {steps} done again"

    def sum_up(
        self, outcome: str, cause: str | None, seconds: PhaseSeconds, restarts: Sequence[str]
    ) -> int:
        """Print what the run did, and write it into `summary.json`."""
        run_dir = self._lease.run_dir
        summary = Summary(
            kind=self._steps.kind,
            run_dir=str(run_dir.root),
            term=self._lease.term,
            outcome=outcome,
            cause=cause,
            max_steps=self._steps.max_steps,
            seconds=seconds,
            totals=self._totals,
            best=_best(run_dir),
            restarts=tuple(restarts),
        )
        self.lines(summary.lines())
        try:
            write_json(run_dir.summary, summary.as_json())
        except OSError as error:
            self.line(f"{run_dir.summary} cannot be written: {error.strerror}")
        is_untrained = outcome == StalledError.outcome and not self._totals.num_steps
        return ExitCode.UNFIT if is_untrained else ExitCode.DONE


def _best(run_dir: RunDirectory) -> BestVersion | None:
    with suppress(CorruptStateError):
        return read_best(run_dir)
    return None

"""How a run ends before its last step: the trainer saves what it has, and only then it ends.

a loop fails, nothing is left to train, or    the cause is noted, no group comes any more
the goal is reached or the reward stalls
the batches that are full are trained         the trainer is told that none follows
the last version is trained                   both roles save it, the final model is written
the trainer is done                           the run ends: well if it has a good end
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradus.errors import (
    DeadlineError,
    EmptyBatchError,
    EnvironmentFailure,
    FencedError,
    GoodEnd,
    GradusError,
    SolvedError,
    StorageError,
)
from gradus.files import write_atomically
from gradus.monitor import Goal
from gradus.orchestrator.evaluation.evaluator import RlEvaluation
from gradus.orchestrator.failures import root_cause, to_its_end
from gradus.orchestrator.groups.batcher import Batcher
from gradus.orchestrator.resume.snapshot import Snapshotter
from gradus.orchestrator.trainer_link import TrainerLink
from gradus.run.paths import RunDirectory


@dataclass(frozen=True)
class EarlyEnd:
    """Owns what happens between the cause of an early end and the end."""

    run_dir: RunDirectory
    trainer: TrainerLink
    batcher: Batcher
    snapshotter: Snapshotter
    evaluation: RlEvaluation
    goal: Goal
    max_lag: int
    _looked: asyncio.Event = field(default_factory=asyncio.Event)

    async def after(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop whose error ends the run only once the trainer has saved what it trained."""
        with self.saved_before():
            await to_its_end(name, loop)

    @contextmanager
    def saved_before(self) -> Iterator[None]:
        """The same for a part of a loop that continues."""
        try:
            yield
        except Exception as error:
            cause = root_cause(error)
            is_first = self.batcher.ended is None
            if is_first and isinstance(cause, EmptyBatchError | EnvironmentFailure):
                self._tell(cause)
            if not isinstance(cause, GradusError) or not self._can_save_before(cause):
                raise
            self.batcher.end(cause)

    def _tell(self, end: GradusError) -> None:
        ends = self.run_dir.good_ends
        path = ends[end.outcome] if isinstance(end, GoodEnd) else self.run_dir.evicted
        write_atomically(path, f"{end}\n".encode())

    def look(self) -> None:
        """End the run if its goal is reached, its reward stalls, or an alarm says so."""
        self._looked.set()
        end = self.goal.end or self.trainer.step_metrics.alarm_end
        if end is not None and self.batcher.ended is None:
            self._tell(end)
            self.batcher.end(end)

    async def decided(self) -> None:
        """Return when no step that trains now could have ended the run before the next batch.

        Otherwise the last step depends on who is faster, and no synchronous run repeats itself.
        """
        while (
            self.batcher.ended is None
            and self.goal.follows_steps
            and max(self.goal.num_steps, self.trainer.first_step) < self.batcher.step - self.max_lag
        ):
            self._looked.clear()
            await self._looked.wait()

    def _can_save_before(self, end: GradusError) -> bool:
        if isinstance(end, FencedError | StorageError | DeadlineError):
            return False  # There is no place to save it, or no one to answer.
        is_trained = self.trainer.num_shipped > self.trainer.first_step
        return is_trained or isinstance(end, GoodEnd)

    async def announce(self) -> None:
        """Every full batch was sent: tell the trainer that no other comes."""
        if self.trainer.num_finished == self.trainer.num_shipped:
            self.snapshotter.trained(self.trainer.num_finished - 1, is_saved=True)
        await self.trainer.end_early()

    def trained(self, step: int, *, is_saved: bool) -> None:
        """The trainer finished `step`, perhaps the last before an early end."""
        is_early = self.trainer.is_ending and self.is_last(step + 1)
        self.snapshotter.trained(step, is_saved=is_saved or is_early)

    def is_last(self, version: int) -> bool:
        """Whether no batch follows that makes another version."""
        return self.trainer.has_all_batches and version == self.trainer.num_shipped

    async def evaluated(self, version: int) -> None:
        """Return when the last version is measured; after a failure it is not measured."""
        if isinstance(self.batcher.ended, GoodEnd):
            self.evaluation.begin_last(version)
        if self._failure is not None:
            return
        await self.evaluation.released()
        if self.batcher.ended is None and isinstance(self.goal.end, SolvedError):
            self._tell(self.goal.end)

    @property
    def _failure(self) -> GradusError | None:
        ended = self.batcher.ended
        return None if isinstance(ended, GoodEnd) else ended

    def raise_failure(self) -> None:
        """The error that ended the run, now that everything is saved."""
        if self._failure is not None:
            raise self._failure

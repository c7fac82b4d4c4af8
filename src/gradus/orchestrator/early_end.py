"""How a run ends before its last step: the trainer saves what it has, and only then it ends.

a loop fails, or nothing is left to train     the cause is noted, no group comes any more
the batches that are full are trained         the trainer is told that none follows
the last version is trained                   both roles save it, the final model is written
the trainer is done                           the run ends: well if its tasks are solved
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gradus.errors import (
    DeadlineError,
    EmptyBatchError,
    EnvironmentFailure,
    FencedError,
    GradusError,
    SolvedError,
    StorageError,
)
from gradus.files import write_atomically
from gradus.orchestrator.evaluation.evaluator import RlEvaluation
from gradus.orchestrator.failures import root_cause, to_its_end
from gradus.orchestrator.groups.batcher import Batcher
from gradus.orchestrator.resume.snapshot import Snapshotter
from gradus.orchestrator.trainer_link import TrainerLink
from gradus.run.paths import RunDirectory


@dataclass(frozen=True)
class EarlyEnd:
    """Owns what happens between the cause of an early end and the end.

    >>> await early_end.after("collect", orchestrator.collect)  # doctest: +SKIP
    """

    run_dir: RunDirectory
    trainer: TrainerLink
    batcher: Batcher
    snapshotter: Snapshotter
    evaluation: RlEvaluation

    async def after(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop whose error ends the run only once the trainer has saved what it trained."""
        try:
            await to_its_end(name, loop)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, EmptyBatchError | EnvironmentFailure):
                self._tell(cause)
            if not isinstance(cause, GradusError) or not self._can_save_before(cause):
                raise
            self.batcher.end(cause)

    def _tell(self, end: GradusError) -> None:
        path = self.run_dir.solved if isinstance(end, SolvedError) else self.run_dir.evicted
        write_atomically(path, f"{end}\n".encode())

    def _can_save_before(self, end: GradusError) -> bool:
        if isinstance(end, FencedError | StorageError | DeadlineError):
            return False  # There is no place to save it, or no one to answer.
        is_trained = self.trainer.num_shipped > self.trainer.first_step
        return is_trained or isinstance(end, SolvedError)

    async def announce(self) -> None:
        """Every full batch was sent: tell the trainer that no other comes."""
        if self.trainer.num_finished == self.trainer.num_shipped:
            self.snapshotter.trained(self.trainer.num_finished - 1, is_saved=True)
        await self.trainer.end_early()

    def trained(self, step: int, *, is_saved: bool) -> None:
        """The trainer finished `step`, perhaps the last before an early end."""
        is_last = self.trainer.is_ending and step + 1 == self.trainer.num_shipped
        self.snapshotter.trained(step, is_saved=is_saved or is_last)

    async def evaluated(self, version: int) -> None:
        """Return when the last version is measured; after a failure it is not measured."""
        if isinstance(self.batcher.ended, SolvedError):
            self.evaluation.begin_last(version)
        if self._failure is None:
            await self.evaluation.released()

    @property
    def _failure(self) -> GradusError | None:
        ended = self.batcher.ended
        return None if isinstance(ended, SolvedError) else ended

    def raise_failure(self) -> None:
        """The error that ended the run, now that everything is saved."""
        if self._failure is not None:
            raise self._failure

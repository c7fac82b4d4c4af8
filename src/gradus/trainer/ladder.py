"""The step of every run: receive → learn → validate → publish → record → checkpoint.

consumes: batch v of a source, for v from 0     waits for: the source, the other ranks
produces: version v + 1 and a report of step v  unblocked by: what fills the source

Publishing and saving only copy the weights here: threads write the copies while the next step runs.

Learning is forward_backward and optimize, once for each update of the batch; a step, a version and
everything else go by batches. A version is published after a skipped update too, so that counts
agree. Next page: `step.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from gradus.heartbeat import FIRST_STEP_SECONDS, beat, busy
from gradus.log import get_logger, note_step
from gradus.monitor import Column, ConsoleMonitor, JsonlMonitor, MonitorGroup
from gradus.run.paths import RunDirectory
from gradus.run.ready import write_ready
from gradus.trainer.batches import BatchSource
from gradus.trainer.checkpoint.saving import CheckpointSaver
from gradus.trainer.distributed import World
from gradus.trainer.learner import Learner
from gradus.trainer.optimizer.optimizer import Update
from gradus.trainer.publish import PendingVersion
from gradus.trainer.step import StepLoss
from gradus.trainer.throughput import Stopwatch
from gradus.transport import BatchesEnded

logger = get_logger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What a rank knows at the end of a step."""

    step: int
    metrics: Mapping[str, float]
    """Over all ranks."""
    published: PendingVersion | None
    """Version `step + 1`, which is being written, on rank 0 and where it was due."""
    is_saved: bool
    """True if checkpoint `step + 1` is made."""


@dataclass(frozen=True)
class Ladder:
    """One rank of the trainer; owns the order of a step and nothing else."""

    learner: Learner
    batches: BatchSource
    record: Callable[[StepReport], None]
    """Called on every rank."""
    validate: Callable[[int], Mapping[str, float]] | None = None
    """Metrics of a version on what is never learned."""
    publish_version: Callable[[int], PendingVersion | None] | None = None
    """Begins to make a version available, if it is due."""
    saver: CheckpointSaver | None = None
    take_turn: Callable[[int], AbstractContextManager[object]] = nullcontext
    """Has the devices for a step, where something else uses them between steps."""

    def train(self, first_step: int, end_step: int) -> int:
        """All steps from `first_step` to before `end_step`, or to where the batches end; returns
        the step after them."""
        with nullcontext() if self.saver is None else self.saver:
            for step in range(first_step, end_step):
                is_new = step == first_step
                try:
                    with busy("the first step", FIRST_STEP_SECONDS) if is_new else nullcontext():
                        self.train_step(step)
                except BatchesEnded:
                    if self.saver is not None and step > first_step:
                        self.saver.save_last(step)
                    return step
        return end_step

    def train_step(self, step: int) -> None:
        """Train version `step` on batch `step`, which makes version `step + 1`."""
        note_step(step)
        beat("the beginning", step=step)
        watch, version, published = Stopwatch(device=self.learner.world.device), step + 1, None
        with watch.measure("receive"):
            batch = self.batches.receive(step)
        metrics = dict(batch.metrics)
        with self.take_turn(step):
            loss, update = self.learner.learn(step, batch.updates, watch)
            if self.validate is not None:
                with watch.measure("validate"):
                    metrics |= self.validate(version)
            if self.publish_version is not None:
                with watch.measure("publish"):
                    published = self.publish_version(version)
        metrics |= self.learner.meter.measure(batch.micro_batches, watch)
        metrics |= self._learning_metrics(loss, update, watch)
        is_saved = self.saver is not None and self.saver.is_due(version)
        self.record(StepReport(step, metrics, published, is_saved))
        if self.saver is not None:
            self.saver.after_step(version, is_due=is_saved)

    def _learning_metrics(
        self, loss: StepLoss, update: Update, watch: Stopwatch
    ) -> dict[str, float]:
        return {
            "loss/total/mean": loss.total,
            **loss.metrics,
            "optimizer/grad_norm": update.grad_norm,
            "optimizer/lr": update.lr,
            "optimizer/skipped/total": float(self.learner.optimizer.num_skipped),
            "throughput/trained_tokens_per_second": watch.trained_tokens_per_second(loss.tokens),
            **watch.metrics(),
        }


def write_ready_file(run_dir: RunDirectory, term: int, world: World) -> None:
    if world.is_first:
        write_ready(run_dir, "trainer", term)
    logger.info("trainer is ready: %d ranks on %s", world.size, world.device.type)


def build_monitor(
    run_dir: RunDirectory, world: World, *, max_steps: int, columns: tuple[Column, ...]
) -> MonitorGroup:
    """Records for a run without an orchestrator; only rank 0 writes, numbers are of all ranks."""
    if not world.is_first:
        return MonitorGroup([])
    console = ConsoleMonitor(sys.stderr, max_steps=max_steps, columns=columns)
    return MonitorGroup([JsonlMonitor(run_dir.metrics), console])

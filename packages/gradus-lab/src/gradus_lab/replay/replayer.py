"""Sends recorded batches to the trainer, and compares what comes back with the recorded run.

    loop     consumes            waits for              produces            unblocked by
    send     recorded decisions  a step to end          micro batches       the trainer
    follow   trainer's events    the next one           metrics, a report   the trainer

No inference and no environment runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradus.config import RunProcessConfig
from gradus.errors import DeadlineError
from gradus.files import write_atomically, write_json
from gradus.monitor import JsonlMonitor, Monitor
from gradus.orchestrator.failures import run_loops
from gradus.orchestrator.groups.packing import Layout, build_batch
from gradus.processes.liveness import beat_with_loop
from gradus.run.deadlines import LONGEST_WAIT_SECONDS
from gradus.run.lease import check_term
from gradus.run.model_files import digest_files, weights_digest
from gradus.run.paths import RunDirectory
from gradus.run.ready import write_ready
from gradus.transport import SpoolSender
from gradus.wire.events import Event, PolicyPublished, StepFinished, TrainerDone
from gradus_lab.replay.batches import BatchMaker
from gradus_lab.replay.recording import (
    RecordedEpisodes,
    RecordedRun,
    learned,
    open_recorded_run,
    read_learned,
)

BATCHES_AHEAD = 2
"""Batches that may be sent before the first of them is trained."""


def run(config: RunProcessConfig) -> None:
    run_loops(_run(config))


async def _run(config: RunProcessConfig) -> None:
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    assert config.recorded is not None
    recorded = open_recorded_run(Path(config.recorded))
    await asyncio.to_thread(share_images, recorded.run_dir, run_dir)
    monitor = JsonlMonitor(run_dir.metrics)
    sender = SpoolSender(run_dir, config.term)
    write_ready(run_dir, "replayer", config.term)
    beating = asyncio.create_task(beat_with_loop())
    try:
        with RecordedEpisodes(recorded.run_dir, recorded.decisions.terms) as episodes:
            maker = BatchMaker(config, episodes)
            comparison = await Replayer(config, recorded, maker, sender, monitor).play()
    finally:
        beating.cancel()
        monitor.close()
    files = compare_models(recorded, run_dir, num_steps=config.end_step)
    write_json(run_dir.replay_report, comparison.report(files))


def share_images(recorded: RunDirectory, run_dir: RunDirectory) -> None:
    """Let the trainer of a replay find the images of the run: the same files, or copies on another
    disk."""
    run_dir.images.mkdir(parents=True, exist_ok=True)
    for path in recorded.images.glob("*"):
        target = run_dir.images / path.name
        if target.exists():
            continue
        try:
            os.link(path, target)
        except OSError:
            write_atomically(target, path.read_bytes(), mode=0o600)


@dataclass
class Comparison:
    """Owns what the run and its replay came to, step by step.

    >>> comparison = Comparison(weights={1: "ab"}, metrics={0: {"loss/total/mean": 0.5}})
    >>> comparison.published(1, "ab")
    >>> comparison.first_weights is None
    True
    """

    weights: Mapping[int, str | None]
    """Version → digest in the run; None where it was not known."""
    metrics: Mapping[int, Mapping[str, float]]
    """Step → learning metrics of the run."""
    first_weights: int | None = None
    """The first version whose weights differ."""
    first_metrics: int | None = None
    """The first step whose learning metrics differ."""
    differing_metrics: list[str] = field(default_factory=list)
    """Names of those that differ at that step."""
    num_versions: int = 0
    """Versions that were compared."""
    loss: list[tuple[float | None, float | None]] = field(default_factory=list)
    """The loss of each step, of the run and of the replay."""

    def published(self, version: int, digest: str | None) -> None:
        recorded = self.weights.get(version)
        if recorded is None or digest is None:
            return
        self.num_versions += 1
        if digest != recorded and self.first_weights is None:
            self.first_weights = version

    def finished(self, step: int, metrics: Mapping[str, float]) -> None:
        recorded, found = learned(self.metrics.get(step, {})), learned(metrics)
        self.loss.append((recorded.get("loss/total/mean"), found.get("loss/total/mean")))
        names = sorted(recorded.keys() & found.keys())
        wrong = [name for name in names if recorded[name] != found[name]]
        if wrong and self.first_metrics is None:
            self.first_metrics = step
            self.differing_metrics = wrong

    def report(self, files: Mapping[str, bool] | None) -> dict[str, Any]:
        """Everything as JSON values; `files` says of each file of the final model whether it is
        the same, None when the run has no model of that step."""
        is_same_model = files is None or (bool(files) and all(files.values()))
        is_compared = self.num_versions > 0 or bool(files)
        return {
            "is_same": is_compared
            and self.first_weights is None
            and self.first_metrics is None
            and is_same_model,
            "steps": len(self.loss),
            "versions_compared": self.num_versions,
            "first_different_version": self.first_weights,
            "first_different_step": self.first_metrics,
            "different_metrics": self.differing_metrics,
            "model_files": None if files is None else dict(files),
            "loss": [list(pair) for pair in self.loss],
        }


@dataclass
class Replayer:
    """Owns the two loops of a replay."""

    config: RunProcessConfig
    recorded: RecordedRun
    maker: BatchMaker
    sender: SpoolSender
    monitor: Monitor
    digest: Callable[[Path], str | None] = weights_digest
    """Of a published version."""
    answer_seconds: float = LONGEST_WAIT_SECONDS
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BATCHES_AHEAD))

    async def play(self) -> Comparison:
        """Until the trainer is done, or the first batch that is not the recorded one."""
        comparison = Comparison(
            self.recorded.decisions.weights, read_learned(self.recorded.run_dir.metrics)
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.send())
            await self.follow(comparison)
        return comparison

    async def send(self) -> None:
        """Make and send every batch."""
        layout = Layout.of(self.config)
        decisions = self.recorded.decisions.first(self.config.end_step)
        async for batch in self.maker.make(decisions):
            await self._room.acquire()
            await self.sender.send(
                build_batch(batch.samples, step=batch.step, term=self.config.term, layout=layout)
            )

    async def follow(self, comparison: Comparison) -> None:
        """Compare the trainer's events with those of the run."""
        while True:
            match await self._next_event():
                case PolicyPublished(version=version, directory=directory):
                    comparison.published(version, self.digest(Path(directory)))
                case StepFinished(step=step, metrics=metrics):
                    self._room.release()
                    comparison.finished(step, metrics)
                    self.monitor.record(metrics, step=step)
                case TrainerDone():
                    return

    async def _next_event(self) -> Event:
        try:
            async with asyncio.timeout(self.answer_seconds):
                return await self.sender.receive_event()
        except TimeoutError as error:
            raise DeadlineError(
                f"the trainer said nothing for {self.answer_seconds:g} s; see logs/trainer.log"
            ) from error


def compare_models(
    recorded: RecordedRun, run_dir: RunDirectory, *, num_steps: int
) -> dict[str, bool] | None:
    """For each file with tensors of the final model, whether it is the run's, byte by byte.

    None when the run has no model after so many steps.
    """
    is_whole = recorded.decisions.is_finished and num_steps == recorded.decisions.num_trained
    if not is_whole or not recorded.run_dir.model.is_dir():
        return None
    same: dict[str, bool] = {}
    for was, now in (
        (recorded.run_dir.model, run_dir.model),
        (recorded.run_dir.adapter, run_dir.adapter),
    ):
        before, after = (digest_files(folder, ["*.safetensors"]) for folder in (was, now))
        for name in sorted(before.keys() | after.keys()):
            same[f"{was.name}/{name}"] = before.get(name) == after.get(name)
    return same

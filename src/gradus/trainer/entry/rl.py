"""The trainer of a reinforcement-learning run, or of its replay: one rank.

Events of step v, in order: BatchReceived(v) when every rank holds the batch,
PolicyPublished(v + 1), StepFinished(v) with the metrics of all ranks. CheckpointStaged(v) follows
some time after the step that made version v. TrainerDone follows the last step, after the final
model lies in the run directory. A resumed run first publishes the version of its checkpoint again:
inference starts from the initial weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from gradus.config import TrainerProcessConfig
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.batches import SpooledBatches
from gradus.trainer.checkpoint.saving import CheckpointSaver, check_space, resume
from gradus.trainer.distributed import World, join_world
from gradus.trainer.ladder import Ladder, StepReport, write_ready_file
from gradus.trainer.learner import Learner
from gradus.trainer.model.load import load_tokenizer
from gradus.trainer.model.lora import ADAPTER_STEM, adapter_tensors
from gradus.trainer.publish import PolicyPublisher, announcement, model_files, serving_tensors
from gradus.transport import BatchReceiver, SpoolReceiver
from gradus.weights.broadcast import BroadcastWeights
from gradus.weights.filesystem import FilesystemWeights, write_tensors
from gradus.weights.published import WeightPublisher
from gradus.wire.events import CheckpointStaged, StepFinished, TrainerDone


def run(config: TrainerProcessConfig) -> None:
    """Train all steps of a run; under torchrun, as one of its ranks."""
    trainer = config.trainer
    with join_world(deterministic=trainer.deterministic, parallel=trainer.parallel) as world:
        torch.manual_seed(config.seed)
        # Absolute, so that events name files for other processes.
        run_dir = RunDirectory(Path(config.run_dir).absolute())
        with closing(SpoolReceiver(run_dir, config.term, world.data_rank)) as receiver:
            _train(config, world, run_dir, receiver)


def _train(
    config: TrainerProcessConfig, world: World, run_dir: RunDirectory, receiver: BatchReceiver
) -> None:
    trainer = config.trainer
    learner = Learner.build(
        config.model, trainer, trainer.loss, max_steps=config.max_steps, world=world
    )
    files = model_files(learner.model, load_tokenizer(config.model), learner.dtype)
    publisher = _build_publisher(config, learner, run_dir, files)
    saver = _build_saver(config, learner, run_dir, receiver)
    ladder = Ladder(
        learner,
        SpooledBatches(
            receiver,
            world,
            term=config.term,
            vocabulary=learner.vocabulary,
            timeout_seconds=trainer.receive_timeout_seconds,
        ),
        record=partial(_send_report, receiver, config.term),
        publish_version=publisher.publish_version,
        saver=saver,
    )
    write_ready_file(run_dir, config.term, world)
    if config.resume_step is not None:
        resume(saver.state, saver.checkpoints, config.resume_step)
        published = publisher.publish_version(config.resume_step)
        if published is not None:
            receiver.send_event(announcement(published, config.term))
    ladder.train(config.resume_step or 0, config.end_step)
    learner.save(run_dir, files)
    publisher.finish()
    if world.is_first:
        receiver.send_event(TrainerDone(step=config.end_step - 1, term=config.term))


def _send_report(receiver: BatchReceiver, term: int, report: StepReport) -> None:
    """Tell the orchestrator of a step; only rank 0 has something published to tell."""
    published = report.published
    if published is None:
        return
    metrics = dict(report.metrics) | {
        "weights/version": float(published.version),
        "weights/publish_seconds": report.metrics["time/publish_seconds"],
    }
    receiver.send_event(announcement(published, term))
    receiver.send_event(
        StepFinished(step=report.step, term=term, metrics=metrics, is_saved=report.is_saved)
    )


def _build_saver(
    config: TrainerProcessConfig, learner: Learner, run_dir: RunDirectory, receiver: BatchReceiver
) -> CheckpointSaver:
    """Saves only the trainer's part; the orchestrator adds its own and commits both."""
    state = learner.state
    check_space(state, run_dir, config.checkpoint)

    def announce(step: int) -> None:
        receiver.send_event(CheckpointStaged(step=step, term=config.term))

    return CheckpointSaver(
        state=state,
        checkpoints=CheckpointStore(run_dir, config.term),
        config=config.checkpoint,
        max_steps=config.max_steps,
        announce=announce,
    )


def _build_publisher(
    config: TrainerProcessConfig,
    learner: Learner,
    run_dir: RunDirectory,
    files: Mapping[str, bytes],
) -> PolicyPublisher:
    """Publishes whole weights with `files` beside them, or adapters with theirs."""
    lora = config.trainer.lora
    serves_adapter = lora is not None and lora.serve == "adapter"
    beside = learner.adapter_files() if serves_adapter else files
    stem = ADAPTER_STEM if serves_adapter else "model"
    is_first = learner.world.is_first
    return PolicyPublisher(
        learner.model,
        learner.world,
        dtype=learner.dtype,
        weights=_build_weights(config, learner, run_dir, beside, stem) if is_first else None,
        served=adapter_tensors if serves_adapter else serving_tensors,
    )


def _build_weights(
    config: TrainerProcessConfig,
    learner: Learner,
    run_dir: RunDirectory,
    files: Mapping[str, bytes],
    stem: str,
) -> WeightPublisher:
    """The weight transfer that the config names."""
    trainer = config.trainer
    if trainer.weight_transfer == "broadcast":
        return BroadcastWeights(
            run_dir,
            term=config.term,
            extra_files=files,
            num_receivers=config.num_inference_workers,
            device=learner.world.device,
            keep_published=trainer.keep_published,
            timeout_seconds=trainer.receive_timeout_seconds,
        )
    return FilesystemWeights(
        run_dir,
        term=config.term,
        extra_files=files,
        keep_published=trainer.keep_published,
        write=partial(write_tensors, stem=stem),
    )

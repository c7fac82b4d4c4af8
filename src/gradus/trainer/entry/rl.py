"""The trainer of a reinforcement-learning run, or of its replay: one rank.

Events of step v, in order: PolicyPublished(v + 1) once the version is whole on disk,
StepFinished(v) with the metrics of all ranks. CheckpointStaged(v) follows some time after
StepFinished(v - 1). One thread sends them while the next step runs. TrainerDone follows the last
step, after the final model lies in the run directory. The last step is that of the config, or the
one before the batches end. A resumed run first publishes the version of its checkpoint again:
inference starts from the initial weights.

A trainer that is started again in its term trains the same batches again from the newest
checkpoint. It says nothing of steps before the newest version on disk, which were told; that
version and its step are told again, and whoever knows them ignores that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gradus.config import RunProcessConfig
from gradus.errors import ConfigError
from gradus.files import add_line
from gradus.run.checkpoints import CheckpointStore
from gradus.run.deadlines import LONGEST_WAIT_SECONDS
from gradus.run.paths import RunDirectory
from gradus.trainer.batches import SpooledBatches
from gradus.trainer.checkpoint.saving import CheckpointSaver, check_space, resume
from gradus.trainer.distributed import World, join_world, training_device
from gradus.trainer.entry.token_recorder import SourceNumbers, TokenRecorder
from gradus.trainer.entry.turns import GpuTurns
from gradus.trainer.images.pixels import pixels_of
from gradus.trainer.ladder import Ladder, StepReport, write_ready_file
from gradus.trainer.learner import Learner
from gradus.trainer.model.load import load_tokenizer
from gradus.trainer.model.lora import ADAPTER_STEM, adapter_tensors
from gradus.trainer.model.policy_model import TokenScores
from gradus.trainer.model.probe import refuse_inexact
from gradus.trainer.publish import (
    PendingVersion,
    PolicyCopy,
    PolicyPublisher,
    WeightSnapshot,
    announcement,
    model_files,
    serving_tensors,
)
from gradus.trainer.step import Observer
from gradus.transport import SpoolReceiver
from gradus.weights.broadcast import BroadcastSettings, BroadcastWeights
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import WeightPublisher
from gradus.weights.publishing_thread import PublishingThread
from gradus.weights.tensor_files import write_tensors
from gradus.wire.events import CheckpointStaged, Event, StepFinished, TrainerDone
from gradus.wire.micro_batch import MicroBatch


def run(config: RunProcessConfig, *, longest_wait_seconds: float = LONGEST_WAIT_SECONDS) -> None:
    """Train all steps of a run; under torchrun, as one of its ranks."""
    trainer = config.trainer
    with join_world(
        training_device(), deterministic=trainer.deterministic, parallel=trainer.parallel
    ) as world:
        torch.manual_seed(config.seed)
        # Absolute, so that events name files for other processes.
        run_dir = RunDirectory(Path(config.run_dir).absolute())
        receiver = SpoolReceiver(run_dir, config.term, world.data_rank)
        with PublishingThread() as thread:
            _train(config, world, _Channels(run_dir, receiver, thread), longest_wait_seconds)


@dataclass(frozen=True)
class _Channels:
    """Where a run's batches come from, and its versions, checkpoints and events go."""

    run_dir: RunDirectory
    receiver: SpoolReceiver
    thread: PublishingThread
    """Sends the events, behind what they tell of and one after the other."""

    def send(self, event: Event) -> None:
        """Send `event` once everything that was given to the thread before is done."""
        self.thread.submit(lambda: self.receiver.send_event(event))


def _train(
    config: RunProcessConfig, world: World, channels: _Channels, longest_wait_seconds: float
) -> None:
    trainer, run_dir = config.trainer, channels.run_dir
    turns = _build_turns(config, world, run_dir)
    # Loading, probing and gathering take room too, which the engine has while it is awake.
    alone = nullcontext if turns is None else turns.taken
    with alone(0):
        learner = Learner.build(
            config.model,
            trainer,
            trainer.loss,
            max_steps=config.max_steps,
            world=world,
            is_resumed=config.resume_step is not None,
            is_reference_served=config.is_reference_served,
        )
    recorder = TokenRecorder(run_dir, share=trainer.recorded_share, term=config.term, world=world)
    numbers = SourceNumbers([source.name for source in config.sources], world)
    learner = learner.observed_by(_both(recorder.observe, numbers.observe))
    files = model_files(learner.model, load_tokenizer(config.model), learner.dtype)
    publisher = _build_publisher(config, learner, channels, files)
    saver = _build_saver(config, learner, channels, publisher.newest)
    batches = _build_batches(config, learner, channels, longest_wait_seconds)
    ladder = Ladder(
        learner,
        batches,
        record=partial(_record, recorder, numbers, channels, config.term),
        publish_version=publisher.publish_version,
        saver=saver,
        take_turn=alone if turns is None else partial(turns.taken, settle=publisher.settle),
    )
    write_ready_file(run_dir, config.term, world)
    if config.resume_step is not None:
        with alone(0):
            resume(saver.state, saver.checkpoints, config.resume_step)
            refuse_inexact(learner.policy, world)
            published = publisher.publish_version(config.resume_step)
        if published is not None:
            _submit_announcement(channels, config.term, published)
    with closing(recorder), closing(batches):
        num_trained = ladder.train(config.resume_step or 0, config.end_step)
    # Where the final model lies, the last version does too.
    publisher.settle()
    with alone(0):
        learner.save(run_dir, files)
    publisher.finish()
    if world.is_first:
        channels.send(TrainerDone(step=num_trained - 1, term=config.term))
        channels.thread.wait()


def _build_batches(
    config: RunProcessConfig, learner: Learner, channels: _Channels, longest_wait_seconds: float
) -> SpooledBatches:
    return SpooledBatches(
        channels.receiver,
        learner.world,
        vocabulary=learner.vocabulary,
        routers=learner.policy.routers,
        timeout_seconds=longest_wait_seconds,
        end_step=config.end_step,
        check=channels.thread.check,
        pixels=pixels_of(learner.model, config.model, channels.run_dir.images, learner.dtype),
    )


def _both(one: Observer, other: Observer) -> Observer:
    def observe(micro_batch: MicroBatch, scores: TokenScores, num_counted: int) -> None:
        one(micro_batch, scores, num_counted)
        other(micro_batch, scores, num_counted)

    return observe


def _submit_announcement(channels: _Channels, term: int, pending: PendingVersion) -> None:
    """Tell the orchestrator of a version once it is whole."""
    channels.thread.submit(
        lambda: channels.receiver.send_event(announcement(pending.published, term))
    )


def _record(
    recorder: TokenRecorder,
    numbers: SourceNumbers,
    channels: _Channels,
    term: int,
    report: StepReport,
) -> None:
    """Tell the orchestrator of a step; only rank 0 has something published to tell."""
    recorder.write(report.step)
    of_sources = numbers.take()
    pending = report.published
    if pending is None:
        return

    def tell() -> None:
        metrics = {
            **report.metrics,
            **of_sources,
            "weights/version": float(pending.version),
            "weights/publish_seconds": pending.seconds,
        }
        channels.receiver.send_event(
            StepFinished(step=report.step, term=term, metrics=metrics, is_saved=report.is_saved)
        )

    _submit_announcement(channels, term, pending)
    channels.thread.submit(tell)


def _build_saver(
    config: RunProcessConfig, learner: Learner, channels: _Channels, newest: int
) -> CheckpointSaver:
    """Saves only the trainer's part; the orchestrator adds its own and commits both."""
    state, run_dir = learner.state, channels.run_dir
    is_fresh = config.resume_step is None and not newest
    check_space(state, run_dir, config.checkpoint, is_fresh=is_fresh)
    checkpoints = CheckpointStore(run_dir, config.term)
    # Of an earlier process of this term, which may not be whole.
    learner.world.first_rank_does(checkpoints.discard_staged)

    def announce(step: int) -> None:
        channels.send(CheckpointStaged(step=step, term=config.term))

    return CheckpointSaver(
        state=state,
        checkpoints=checkpoints,
        config=config.checkpoint,
        max_steps=config.max_steps,
        announce=announce,
        newest=newest,
    )


def _build_turns(config: RunProcessConfig, world: World, run_dir: RunDirectory) -> GpuTurns | None:
    """How the engine leaves a device that it shares; None where the trainer's are its own."""
    if config.engine_sleep_seconds is None:
        return None
    return GpuTurns(
        run_dir,
        config.term,
        world,
        wait_seconds=LONGEST_WAIT_SECONDS,
        sleep_seconds=config.engine_sleep_seconds,
    )


def _build_publisher(
    config: RunProcessConfig,
    learner: Learner,
    channels: _Channels,
    files: Mapping[str, bytes],
) -> PolicyPublisher:
    """Publishes whole weights with `files` beside them, or adapters with theirs."""
    lora = config.trainer.lora
    serves_adapter = lora is not None and lora.serve == "adapter"
    beside = learner.adapter_files() if serves_adapter else files
    stem = ADAPTER_STEM if serves_adapter else "model"
    weights: WeightPublisher | None = None
    newest = 0
    snapshot: PolicyCopy = WeightSnapshot()
    if learner.world.is_first:
        if config.trainer.weight_transfer == "broadcast":
            settings = _broadcast_settings(config, learner)
            weights = _build_broadcast(config, channels.run_dir, beside, settings)
            snapshot = settings.snapshot() or snapshot
        else:
            weights = stored = FilesystemWeights(
                channels.run_dir,
                term=config.term,
                extra_files=beside,
                keep_published=config.keep_published,
                write=partial(write_tensors, stem=stem),
                is_exact=config.trainer.deterministic,
            )
            newest = stored.newest
    return PolicyPublisher(
        learner.model,
        learner.world,
        dtype=learner.dtype,
        weights=weights,
        thread=channels.thread,
        served=adapter_tensors if serves_adapter else serving_tensors,
        snapshot=snapshot,
        newest=int(learner.world.maxima({"newest": newest})["newest"]),
    )


def _broadcast_settings(config: RunProcessConfig, learner: Learner) -> BroadcastSettings:
    backend = config.trainer.broadcast_backend
    if backend == "auto":
        raise ConfigError(
            'trainer.broadcast_backend = "auto" is decided where a run is launched, so that both '
            'ends agree; for a trainer started by hand write "nccl" or "gloo"'
        )
    return BroadcastSettings(
        num_receivers=config.inference.tensor_parallel_size,
        device=learner.world.device,
        backend=backend,
        timeout_seconds=LONGEST_WAIT_SECONDS,
    )


def _build_broadcast(
    config: RunProcessConfig,
    run_dir: RunDirectory,
    files: Mapping[str, bytes],
    settings: BroadcastSettings,
) -> BroadcastWeights:
    def tell(reason: str) -> None:
        reason = f"weights go through files from now on, not by broadcast: {reason}"
        add_line(run_dir.notices, reason)

    return BroadcastWeights(
        run_dir,
        term=config.term,
        extra_files=files,
        settings=settings,
        keep_published=max(2, config.keep_published - 1),
        on_fallback=tell,
    )

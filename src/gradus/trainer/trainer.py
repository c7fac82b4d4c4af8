"""The trainer: receive → forward_backward → optimize → publish → record → checkpoint, per step.

consumes: batch v, for v from 0                 waits for: the orchestrator's batch, the other ranks
produces: version v + 1 and the events below    unblocked by: the orchestrator's ship loop

With `updates_per_batch` the two rungs of learning run once for each part of the batch; a step, a
version and everything below still go by batches.

Events of step v, in order: BatchReceived(v) when every rank holds the batch,
PolicyPublished(v + 1), StepFinished(v) with the metrics of all ranks. CheckpointStaged(v) follows
some time after the step that made version v. TrainerDone follows the last step, after the final
model lies in the run directory. A resumed run first publishes the version of its checkpoint again:
inference starts from the initial weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from gradus.config import TrainerProcessConfig
from gradus.files import write_json
from gradus.log import get_logger
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.batch_stream import BatchStream
from gradus.trainer.checkpoint.saving import CheckpointSaver, Handover, check_space, resume
from gradus.trainer.checkpoint.training_state import TrainingState, build_origin
from gradus.trainer.distributed import World, join_world
from gradus.trainer.losses import build_loss
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.lora import (
    ADAPTER_STEM,
    adapter_files,
    adapter_tensors,
    add_adapters,
)
from gradus.trainer.model.policy_model import build_policy, vocabulary_size
from gradus.trainer.model.serving_names import serving_tensors
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer, Update, merge_updates
from gradus.trainer.publish import PolicyPublisher, model_files
from gradus.trainer.step import GradientStep, StepLoss, merge_losses
from gradus.trainer.throughput import Stopwatch, WorkMeter
from gradus.transport.base import BatchReceiver
from gradus.transport.spool import SpoolReceiver
from gradus.weights.base import Published, WeightPublisher
from gradus.weights.broadcast import BroadcastWeights
from gradus.weights.filesystem import FilesystemWeights, write_tensors
from gradus.wire.events import CheckpointStaged, PolicyPublished, StepFinished, TrainerDone
from gradus.wire.micro_batch import MicroBatch

logger = get_logger(__name__)


@dataclass(frozen=True)
class Trainer:
    """One rank of the trainer; owns the order of a step and nothing else."""

    world: World
    term: int
    receiver: BatchReceiver
    stream: BatchStream
    gradients: GradientStep
    optimizer: PolicyOptimizer
    publisher: PolicyPublisher
    saver: CheckpointSaver
    meter: WorkMeter

    def train_step(self, step: int) -> None:
        """Train version `step` on batch `step` and publish version `step + 1`."""
        watch = Stopwatch(device=self.world.device)
        updates = self.receive(step, watch)
        micro_batches = list(chain.from_iterable(updates))
        if len(updates) > 1:
            self.gradients.refuse_unscored(self.gradients.count(micro_batches))
        losses, done = [], []
        for part in updates:
            losses.append(self.forward_backward(part, watch, is_whole_batch=len(updates) == 1))
            done.append(self.optimize(step, watch))
        loss, update = merge_losses(losses), merge_updates(done)
        published = self.publish(step + 1, watch)
        work = self.meter.measure(micro_batches, watch)
        metrics = learning_metrics(loss, update, watch, num_skipped=self.optimizer.num_skipped)
        is_saved = self.saver.decides(step + 1)
        self.record(step, metrics | work, published, watch, is_saved=is_saved)
        self.checkpoint(step + 1, is_due=is_saved)

    def publish_again(self, version: int) -> None:
        """Make the version of a checkpoint available before the first batch is waited for."""
        published = self.publish(version, Stopwatch())
        if published is not None:
            self._announce(published)

    def receive(self, step: int, watch: Stopwatch) -> list[list[MicroBatch]]:
        """Wait for this rank's part of the batch; the micro batches of each update."""
        with watch.measure("receive"):
            return self.stream.receive(step)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], watch: Stopwatch, *, is_whole_batch: bool
    ) -> StepLoss:
        """Put the gradients of the batch, or of its part for one update, into the parameters."""
        with watch.measure("forward_backward"):
            return self.gradients.run(micro_batches, is_whole_batch=is_whole_batch)

    def optimize(self, step: int, watch: Stopwatch) -> Update:
        """Change the weights, unless a gradient is not finite."""
        with watch.measure("optimize"):
            return self.optimizer.step(step)

    def publish(self, version: int, watch: Stopwatch) -> Published | None:
        """Make the new weights available; also after a skipped update, so that counts agree."""
        with watch.measure("publish"):
            return self.publisher.publish(version)

    def record(
        self,
        step: int,
        learned: Mapping[str, float],
        published: Published | None,
        watch: Stopwatch,
        *,
        is_saved: bool,
    ) -> None:
        """Tell the orchestrator; only rank 0 has something published to tell."""
        if published is None:
            return
        metrics = dict(learned) | {
            "weights/version": float(published.version),
            "weights/publish_seconds": watch.seconds("publish"),
        }
        self._announce(published)
        self.receiver.send_event(
            StepFinished(step=step, term=self.term, metrics=metrics, is_saved=is_saved)
        )

    def checkpoint(self, version: int, *, is_due: bool) -> None:
        """Save the trainer's part of checkpoint `version`, when one is due."""
        self.saver.after_step(version, is_due=is_due)

    def _announce(self, published: Published) -> None:
        self.receiver.send_event(
            PolicyPublished(
                version=published.version,
                term=self.term,
                directory=str(published.directory),
                digest=published.digest,
            )
        )


def learning_metrics(
    loss: StepLoss, update: Update, watch: Stopwatch, *, num_skipped: int
) -> dict[str, float]:
    """The metrics that reinforcement learning and supervised training share."""
    return {
        "loss/total/mean": loss.total,
        **loss.metrics,
        "optimizer/grad_norm": update.grad_norm,
        "optimizer/lr": update.lr,
        "optimizer/skipped/sum": float(num_skipped),
        "throughput/trained_tokens_per_second": watch.trained_tokens_per_second(loss.tokens),
        **watch.metrics(),
    }


def run(config: TrainerProcessConfig) -> None:
    """Train all steps of a run; under torchrun, as one of its ranks."""
    trainer = config.trainer
    with join_world(deterministic=trainer.deterministic, parallel=trainer.parallel) as world:
        torch.manual_seed(config.seed)
        receiver = SpoolReceiver(run_directory(config.run_dir), config.term, world.data_rank)
        try:
            _train(config, world, receiver)
        finally:
            receiver.close()


def run_directory(path: str) -> RunDirectory:
    """The run directory at an absolute path, so that events name files for other processes."""
    return RunDirectory(Path(path).absolute())


def serving_dtype(compute_dtype: str) -> torch.dtype:
    """Dtype of compute, publishing and serving."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[compute_dtype]


def _train(config: TrainerProcessConfig, world: World, receiver: BatchReceiver) -> None:
    run_dir = run_directory(config.run_dir)
    dtype = serving_dtype(config.trainer.compute_dtype)
    model = load_model(config.model, world.device)
    files = model_files(model, load_tokenizer(config.model), dtype)
    lora = config.trainer.lora
    origin = build_origin(
        config.model, config.trainer.compute_dtype, lora, model=model, world=world
    )
    if lora is not None:
        add_adapters(model, lora, dtype)
    parallel = config.trainer.parallel
    policy = shard_model(build_policy(model, config.trainer, world), world.mesh, dtype, parallel)
    adapter = (
        {} if lora is None else adapter_files(model, lora, config.model.name, origin.base_sha256)
    )
    optimizer = PolicyOptimizer(
        policy,
        config.trainer.optimizer,
        max_steps=config.max_steps,
        max_skipped_steps=config.trainer.max_skipped_steps,
        world=world,
    )
    state = TrainingState(policy, optimizer, world, origin)
    trainer = Trainer(
        world=world,
        term=config.term,
        receiver=receiver,
        stream=BatchStream(
            receiver,
            world,
            term=config.term,
            vocabulary=vocabulary_size(model),
            timeout_seconds=config.trainer.receive_timeout_seconds,
        ),
        gradients=GradientStep(
            policy,
            build_loss(config.trainer.loss),
            world,
            sync=parallel.gradient_sync,
            aggregation=config.trainer.loss.aggregation,
        ),
        optimizer=optimizer,
        publisher=_build_publisher(
            config, model, world, adapter if _serves_adapter(config) else files
        ),
        saver=_build_saver(config, state, receiver),
        meter=WorkMeter.build(model, world, dtype, config.trainer.peak_teraflops),
    )
    if world.is_first:
        write_json(run_dir.ready_file("trainer"), {"pid": os.getpid(), "term": config.term})
    logger.info("trainer is ready: %d ranks on %s", world.size, world.device.type)
    with trainer.saver:
        _train_steps(config, trainer)
    trainer.publisher.save(run_dir.model, files)
    if lora is not None:
        trainer.publisher.save_adapter(run_dir.adapter, adapter)
    trainer.publisher.finish()
    if world.is_first:
        receiver.send_event(TrainerDone(step=config.end_step - 1, term=config.term))


def _train_steps(config: TrainerProcessConfig, trainer: Trainer) -> None:
    """All steps that are left, from the checkpoint to go on from or from the first."""
    if config.resume_step is not None:
        resume(trainer.saver.state, trainer.saver.checkpoints, config.resume_step)
        trainer.publish_again(config.resume_step)
    for step in range(config.resume_step or 0, config.end_step):
        trainer.train_step(step)


def _build_saver(
    config: TrainerProcessConfig, state: TrainingState, receiver: BatchReceiver
) -> CheckpointSaver:
    """Saves only the trainer's part; the orchestrator adds its own and commits both."""
    run_dir = run_directory(config.run_dir)
    check_space(state, run_dir, config.checkpoint)

    def announce(step: int) -> None:
        receiver.send_event(CheckpointStaged(step=step, term=config.term))

    return CheckpointSaver(
        state=state,
        checkpoints=CheckpointStore(run_dir, config.term),
        config=config.checkpoint,
        max_steps=config.max_steps,
        handover=Handover(announce=announce),
    )


def _build_publisher(
    config: TrainerProcessConfig,
    model: PreTrainedModel,
    world: World,
    files: Mapping[str, bytes],
) -> PolicyPublisher:
    """Publishes whole weights or adapters, with `files` beside them."""
    return PolicyPublisher(
        model,
        world,
        dtype=serving_dtype(config.trainer.compute_dtype),
        weights=_build_weights(config, world, files) if world.is_first else None,
        served=adapter_tensors if _serves_adapter(config) else serving_tensors,
    )


def _build_weights(
    config: TrainerProcessConfig, world: World, files: Mapping[str, bytes]
) -> WeightPublisher:
    """The weight transfer that the config names."""
    run_dir = run_directory(config.run_dir)
    if config.trainer.weight_transfer == "broadcast":
        return BroadcastWeights(
            run_dir,
            term=config.term,
            extra_files=files,
            num_receivers=config.num_inference_workers,
            device=world.device,
            keep_published=config.trainer.keep_published,
            timeout_seconds=config.trainer.receive_timeout_seconds,
        )
    stem = ADAPTER_STEM if _serves_adapter(config) else "model"
    return FilesystemWeights(
        run_dir,
        term=config.term,
        extra_files=files,
        keep_published=config.trainer.keep_published,
        write=partial(write_tensors, stem=stem),
    )


def _serves_adapter(config: TrainerProcessConfig) -> bool:
    """Whether versions are adapters; otherwise they are whole weights."""
    lora = config.trainer.lora
    return lora is not None and lora.serve == "adapter"

"""Supervised fine-tuning: the trainer's step on conversations, from data to a model directory.

Rungs of a step: receive → forward_backward → optimize → validate → publish → record → checkpoint.
Every rank reads the same data in the same order, so that a resumed run only needs to know how far
it had read. Versions are published for evaluation alone, and nothing waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradus.config import LossConfig, SftConfig, SftProcessConfig
from gradus.errors import ConfigError
from gradus.files import write_json
from gradus.log import get_logger
from gradus.monitor.base import Monitor, MonitorGroup
from gradus.monitor.console import SFT_COLUMNS, ConsoleMonitor
from gradus.monitor.jsonl import JsonlMonitor
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.checkpoint.saving import CheckpointSaver, Handover, check_space, resume
from gradus.trainer.checkpoint.training_state import PART, TrainingState, build_origin
from gradus.trainer.data.conversation_files import load_conversations
from gradus.trainer.data.conversation_samples import (
    ConversationEncoder,
    ConversationStream,
    learnable_samples,
    stop_tokens_of,
)
from gradus.trainer.data.conversations import Conversation, PlainText
from gradus.trainer.distributed import World, join_world
from gradus.trainer.evaluated_versions import EvaluatedVersions
from gradus.trainer.losses import build_loss
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.lora import adapter_files, add_adapters
from gradus.trainer.model.policy_model import PolicyModel, build_policy, vocabulary_size
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import PolicyPublisher, model_files
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import check_trainable
from gradus.trainer.throughput import Stopwatch, WorkMeter
from gradus.trainer.trainer import learning_metrics, run_directory, serving_dtype
from gradus.trainer.validation import Validation
from gradus.weights.base import Published
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

logger = get_logger(__name__)

_NUM_READ = "conversations_read"
_DATA_DIGEST = "data_digest"


@dataclass(frozen=True)
class SupervisedTrainer:
    """One rank of a supervised run; every rank reads the same data and trains its own share."""

    config: SftConfig
    world: World
    vocabulary: int
    stream: ConversationStream
    gradients: GradientStep
    optimizer: PolicyOptimizer
    monitor: Monitor
    validation: Validation | None
    versions: EvaluatedVersions | None
    """What is evaluated. None means nothing."""
    saver: CheckpointSaver
    meter: WorkMeter

    def train_step(self, step: int) -> None:
        """Learn the next conversations."""
        watch = Stopwatch(device=self.world.device)
        with watch.measure("receive"):
            samples = self.stream.take(self.config.batch_conversations)
            ranks = pack(
                samples,
                max_tokens=self.config.micro_batch_tokens,
                num_ranks=self.world.data_size,
            )
            micro_batches = ranks[self.world.data_rank]
            for micro_batch in micro_batches:
                check_trainable(micro_batch, self.vocabulary)
        with watch.measure("forward_backward"):
            loss = self.gradients.run(micro_batches)
        with watch.measure("optimize"):
            update = self.optimizer.step(step)
        with watch.measure("validate"):
            held_out = self.validate(step + 1)
        published = self.publish(step + 1, watch)
        metrics = learning_metrics(loss, update, watch, num_skipped=self.optimizer.num_skipped)
        metrics |= held_out | self.meter.measure(micro_batches, watch)
        self.monitor.record(metrics | self._batch_metrics(samples), step=step)
        if self.versions is not None:
            self.versions.announce(published)
        self.saver.after_step(step + 1)

    def validate(self, num_updates: int) -> dict[str, float]:
        """Metrics on what is never learned, when they are due."""
        settings = self.config.validation
        if self.validation is None or settings is None:
            return {}
        is_last = num_updates == self.config.max_steps
        if num_updates % settings.interval_steps and not is_last:
            return {}
        return self.validation.run()

    def publish(self, version: int, watch: Stopwatch) -> Published | None:
        """Write the weights for their evaluation, when that is due."""
        if self.versions is None:
            return None
        with watch.measure("publish"):
            return self.versions.publish(version)

    def _batch_metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        return {
            "batch/samples/sum": float(len(samples)),
            "batch/tokens/sum": float(sum(map(len, samples))),
            "batch/trainable_tokens/sum": float(sum(int(s.loss_mask.sum()) for s in samples)),
            "sample/skipped/sum": float(self.stream.num_skipped),
        }


def run(config: SftProcessConfig) -> None:
    """Train all steps of a supervised run; under torchrun, as one of its ranks."""
    with join_world(deterministic=config.sft.deterministic, parallel=config.sft.parallel) as world:
        torch.manual_seed(config.sft.seed)
        run_dir = run_directory(config.run_dir)
        monitor = _build_monitor(config.sft, run_dir, world)
        try:
            _train(config, world, run_dir, monitor)
        finally:
            monitor.close()


def _train(config: SftProcessConfig, world: World, run_dir: RunDirectory, monitor: Monitor) -> None:
    sft = config.sft
    dtype = serving_dtype(sft.compute_dtype)
    conversations = load_conversations(sft.data)
    held_out = _load_held_out(sft)
    tokenizer = load_tokenizer(sft.model)
    model = load_model(sft.model, world.device)
    files = model_files(model, tokenizer, dtype)
    origin = build_origin(sft.model, sft.compute_dtype, sft.lora, model=model, world=world)
    if sft.lora is not None:
        add_adapters(model, sft.lora, dtype)
    policy = shard_model(build_policy(model, sft, world), world.mesh, dtype, sft.parallel)
    optimizer = PolicyOptimizer(
        policy,
        sft.optimizer,
        max_steps=sft.max_steps,
        max_skipped_steps=sft.max_skipped_steps,
        world=world,
    )
    encoder = ConversationEncoder(tokenizer, stop_tokens_of(model))
    stream = ConversationStream(
        conversations,
        encoder,
        max_tokens=_max_tokens(sft),
        seed=sft.seed,
        shuffle=sft.data.shuffle,
    )
    trainer = SupervisedTrainer(
        config=sft,
        world=world,
        vocabulary=vocabulary_size(model),
        stream=stream,
        gradients=GradientStep(
            policy, build_loss(LossConfig()), world, sync=sft.parallel.gradient_sync
        ),
        optimizer=optimizer,
        monitor=monitor,
        validation=_build_validation(sft, policy, world, encoder, held_out),
        versions=EvaluatedVersions.build(config, world, model, files, dtype),
        saver=_build_saver(config, TrainingState(policy, optimizer, world, origin), stream),
        meter=WorkMeter.build(model, world, dtype, sft.peak_teraflops),
    )
    if world.is_first:
        write_json(run_dir.ready_file("trainer"), {"pid": os.getpid(), "term": config.term})
    logger.info("%d conversations, %d ranks on %s", len(conversations), world.size, world.device)
    _train_steps(config, trainer)
    publisher = PolicyPublisher(model, world, dtype=dtype, weights=None)
    publisher.save(run_dir.model, files)
    if sft.lora is not None:
        adapter = adapter_files(model, sft.lora, sft.model.name, origin.base_sha256)
        publisher.save_adapter(run_dir.adapter, adapter)
    if trainer.versions is not None:
        trainer.versions.finish()


def _train_steps(config: SftProcessConfig, trainer: SupervisedTrainer) -> None:
    """All steps that are left."""
    first_step = _first_step(config, trainer)
    if trainer.versions is not None and config.resume_step is not None:
        trainer.versions.go_on(first_step)
    with trainer.saver:
        for step in range(first_step, config.sft.max_steps):
            trainer.train_step(step)


def _first_step(config: SftProcessConfig, trainer: SupervisedTrainer) -> int:
    """0, or the step of the checkpoint that was loaded."""
    if config.resume_step is None:
        return 0
    progress = resume(trainer.saver.state, trainer.saver.checkpoints, config.resume_step)
    counters = progress.counters
    if counters.get(_DATA_DIGEST) != trainer.stream.digest():
        raise ConfigError(
            f"data.path {config.sft.data.path!r} has changed since checkpoint {progress.step}, so "
            "its order cannot go on where it stopped; restore the data or start a new run"
        )
    trainer.stream.go_to(counters[_NUM_READ])
    return progress.step


def _build_saver(
    config: SftProcessConfig, state: TrainingState, stream: ConversationStream
) -> CheckpointSaver:
    """Rank 0 commits by itself: a supervised run has no other part."""
    run_dir = run_directory(config.run_dir)
    settings = config.sft.checkpoint
    check_space(state, run_dir, settings)
    checkpoints = CheckpointStore(run_dir, config.term)
    if state.world.is_first:
        checkpoints.discard_stale()
    digest = stream.digest()

    def seal(step: int) -> None:
        checkpoints.commit(step, [PART])
        checkpoints.prune(settings.keep_last, settings.keep_interval_steps)

    def counters() -> dict[str, int]:
        return {
            _NUM_READ: stream.num_read,
            _DATA_DIGEST: digest,
        }

    return CheckpointSaver(
        state=state,
        checkpoints=checkpoints,
        config=settings,
        max_steps=config.sft.max_steps,
        handover=Handover(lambda step: logger.info("checkpoint %d is saved", step), seal),
        counters=counters,
    )


def _load_held_out(sft: SftConfig) -> list[Conversation | PlainText]:
    validation = sft.validation
    if validation is None:
        return []
    place = {"path": validation.path, "split": validation.split}
    return load_conversations(sft.data.model_copy(update=place))[: validation.max_conversations]


def _build_validation(
    sft: SftConfig,
    policy: PolicyModel,
    world: World,
    encoder: ConversationEncoder,
    held_out: Sequence[Conversation | PlainText],
) -> Validation | None:
    if sft.validation is None:
        return None
    limit = _max_tokens(sft)
    samples = [sample for it in held_out for sample in learnable_samples(encoder, it, limit)]
    if not samples:
        raise ConfigError(
            f"validation.path {sft.validation.path!r}: none of {len(held_out)} conversations has "
            f"tokens to learn within {limit} tokens"
        )
    return Validation(
        policy,
        world,
        samples,
        micro_batch_tokens=sft.micro_batch_tokens,
        vocabulary=vocabulary_size(policy.model),
    )


def _max_tokens(sft: SftConfig) -> int:
    """Longest sample: the model's context, or what one forward can hold."""
    return min(sft.model.max_length_tokens, sft.micro_batch_tokens)


def _build_monitor(config: SftConfig, run_dir: RunDirectory, world: World) -> MonitorGroup:
    """Only rank 0 records; the numbers are already those of all ranks."""
    if not world.is_first:
        return MonitorGroup([])
    console = ConsoleMonitor(sys.stderr, max_steps=config.max_steps, columns=SFT_COLUMNS)
    return MonitorGroup([JsonlMonitor(run_dir.metrics), console])

"""Supervised fine-tuning: the trainer's step on conversations, from data to a model directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradus.config.process import SftProcessConfig
from gradus.config.sft import SftConfig
from gradus.config.trainer import LossConfig
from gradus.log import get_logger
from gradus.monitor.base import Monitor, MonitorGroup
from gradus.monitor.console import SFT_COLUMNS, ConsoleMonitor
from gradus.monitor.jsonl import JsonlMonitor
from gradus.run_dir import RunDirectory, write_json
from gradus.trainer.conversation_samples import ConversationEncoder, ConversationStream
from gradus.trainer.conversations import load_conversations
from gradus.trainer.distributed import World, join_world
from gradus.trainer.losses import build_loss
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.lora import adapter_files, add_adapters
from gradus.trainer.model.policy_model import PolicyModel, vocabulary_size
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer import PolicyOptimizer
from gradus.trainer.publish import PolicyPublisher, model_files
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import check_trainable
from gradus.trainer.throughput import Stopwatch
from gradus.trainer.trainer import learning_metrics, run_directory, serving_dtype
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

logger = get_logger(__name__)


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

    def train_step(self, step: int) -> None:
        """Learn the next conversations."""
        watch = Stopwatch()
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
        metrics = learning_metrics(loss, update, watch, num_skipped=self.optimizer.num_skipped)
        self.monitor.record(metrics | self._batch_metrics(samples), step=step)

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
    tokenizer = load_tokenizer(sft.model)
    model = load_model(sft.model, world.device)
    files = model_files(model, tokenizer, dtype)
    vocabulary = vocabulary_size(model)
    if sft.lora is not None:
        add_adapters(model, sft.lora, dtype)
    policy = shard_model(PolicyModel(model, world.context), world.mesh, dtype, sft.parallel)
    trainer = SupervisedTrainer(
        config=sft,
        world=world,
        vocabulary=vocabulary,
        stream=ConversationStream(
            conversations,
            ConversationEncoder(tokenizer),
            max_tokens=min(sft.model.max_length_tokens, sft.micro_batch_tokens),
            seed=sft.seed,
            shuffle=sft.data.shuffle,
        ),
        gradients=GradientStep(
            policy, build_loss(LossConfig()), world, sync=sft.parallel.gradient_sync
        ),
        optimizer=PolicyOptimizer(
            policy,
            sft.optimizer,
            max_steps=sft.max_steps,
            max_skipped_steps=sft.max_skipped_steps,
            world=world,
        ),
        monitor=monitor,
    )
    if world.is_first:
        write_json(run_dir.ready_file("trainer"), {"pid": os.getpid(), "epoch": config.epoch})
    logger.info("%d conversations, %d ranks on %s", len(conversations), world.size, world.device)
    for step in range(sft.max_steps):
        trainer.train_step(step)
    publisher = PolicyPublisher(model, world, dtype=dtype, weights=None)
    publisher.save(run_dir.model, files)
    if sft.lora is not None:
        adapter = adapter_files(model, sft.lora, sft.model.name)
        publisher.save_adapter(run_dir.adapter, adapter)


def _build_monitor(config: SftConfig, run_dir: RunDirectory, world: World) -> MonitorGroup:
    """Only rank 0 records; the numbers are already those of all ranks."""
    if not world.is_first:
        return MonitorGroup([])
    console = ConsoleMonitor(sys.stderr, max_steps=config.max_steps, columns=SFT_COLUMNS)
    return MonitorGroup([JsonlMonitor(run_dir.metrics), console])

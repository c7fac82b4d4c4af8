"""What learns on one rank: model, gradients, optimizer, meter and what is saved of them.

Built in one place, for runs that learn from rewards, from conversations, or from made-up samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

import torch
from transformers import PreTrainedModel

from gradus.config import LossConfig, ModelConfig, SftConfig, TrainerConfig
from gradus.run.paths import RunDirectory
from gradus.trainer.checkpoint.training_state import Origin, TrainingState, build_origin
from gradus.trainer.distributed import World
from gradus.trainer.losses import build_loss
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.lora import adapter_files
from gradus.trainer.model.policy_model import PolicyModel, vocabulary_size
from gradus.trainer.model.shard import sync_on
from gradus.trainer.optimizer.optimizer import PolicyOptimizer, Update, merge_updates
from gradus.trainer.publish import save_adapter, save_model, serving_dtype
from gradus.trainer.step import GradientStep, StepLoss, merge_losses
from gradus.trainer.throughput import Stopwatch, WorkMeter
from gradus.wire.micro_batch import MicroBatch


@dataclass(frozen=True)
class Learner:
    """Owns the policy and everything that changes it.

    >>> learner = Learner.build(model, settings, loss, max_steps=9, world=world)  # doctest: +SKIP
    >>> loss, update = learner.learn(step=0, updates=[micro_batches], watch=watch)  # doctest: +SKIP
    """

    base: ModelConfig
    settings: TrainerConfig | SftConfig
    world: World
    model: PreTrainedModel
    """The model inside `policy`, with its adapters."""
    policy: PolicyModel
    """Sharded over the ranks."""
    gradients: GradientStep
    optimizer: PolicyOptimizer
    meter: WorkMeter

    @classmethod
    def build(
        cls,
        base: ModelConfig,
        settings: TrainerConfig | SftConfig,
        loss: LossConfig,
        *,
        max_steps: int,
        world: World,
        is_resumed: bool = False,
    ) -> Self:
        """Load `base` and get it ready to learn; schedules end at `max_steps`.

        `is_resumed` leaves out what the checkpoint holds that is read next.
        """
        dtype = serving_dtype(settings.compute_dtype)
        policy = build_policy(base, settings, world, dtype, is_resumed=is_resumed)
        model = policy.model
        return cls(
            base=base,
            settings=settings,
            world=world,
            model=model,
            policy=policy,
            gradients=GradientStep(
                policy,
                build_loss(loss),
                world,
                sync=sync_on(world.device, settings.parallel),
                aggregation=loss.aggregation,
            ),
            optimizer=PolicyOptimizer(
                policy,
                settings.optimizer,
                max_steps=max_steps,
                max_skipped_steps=settings.max_skipped_steps,
                world=world,
            ),
            meter=WorkMeter.build(model, world, dtype, settings.peak_teraflops),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of compute, publishing and serving."""
        return serving_dtype(self.settings.compute_dtype)

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return vocabulary_size(self.model)

    @cached_property
    def origin(self) -> Origin:
        """What is trained; with adapters, rank 0 reads the files of the model to digest them."""
        settings = self.settings
        return build_origin(
            self.base, settings.compute_dtype, settings.lora, model=self.model, world=self.world
        )

    @property
    def state(self) -> TrainingState:
        """What a checkpoint holds."""
        return TrainingState(self.policy, self.optimizer, self.world, self.origin)

    def learn(
        self, step: int, updates: Sequence[Sequence[MicroBatch]], watch: Stopwatch
    ) -> tuple[StepLoss, Update]:
        """Change the weights once for each update, unless its gradients are not finite."""
        is_whole_batch = len(updates) == 1
        if not is_whole_batch:
            # One part of a batch may well hold no token that a reference model scored.
            everything = list(chain.from_iterable(updates))
            self.gradients.refuse_unscored(self.gradients.count(everything))
        losses, done = [], []
        for micro_batches in updates:
            with watch.measure("forward_backward"):
                losses.append(self.gradients.run(micro_batches, is_whole_batch=is_whole_batch))
            with watch.measure("optimize"):
                done.append(self.optimizer.step(step))
        return merge_losses(losses), merge_updates(done)

    def adapter_files(self) -> dict[str, bytes]:
        """The files of the adapter directory except its tensors; none without adapters."""
        lora = self.settings.lora
        if lora is None:
            return {}
        return adapter_files(self.model, lora, self.base.name, self.origin.base_sha256)

    def save(self, run_dir: RunDirectory, files: Mapping[str, bytes]) -> None:
        """Write the final model with `files` beside it, and the adapters where there are some."""
        save_model(self.model, self.world, self.dtype, run_dir.model, files)
        if self.settings.lora is not None:
            save_adapter(self.model, self.world, self.dtype, run_dir.adapter, self.adapter_files())

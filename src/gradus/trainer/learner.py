"""What learns on one rank: model, gradients, optimizer, meter and what is saved of them.

Built in one place, for runs that learn from rewards, from conversations, or from made-up samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedModel

from gradus.config import ModelConfig, SftConfig, TrainerConfig, learning
from gradus.errors import ConfigError
from gradus.heartbeat import DISK_SECONDS, busy
from gradus.plan.learning_rate import with_rate
from gradus.run.paths import RunDirectory
from gradus.trainer.checkpoint.training_state import Origin, TrainingState
from gradus.trainer.distributed import World
from gradus.trainer.losses import build_loss, needs_reference
from gradus.trainer.model.build import build_policy, build_reference
from gradus.trainer.model.cpu.routing import ExpertLoad
from gradus.trainer.model.lora import adapter_files, base_digest
from gradus.trainer.model.policy_model import PolicyModel, vocabulary_size
from gradus.trainer.model.reference import Reference, scored
from gradus.trainer.model.shard import sync_on
from gradus.trainer.optimizer.optimizer import PolicyOptimizer, Update, merge_updates
from gradus.trainer.publish import save_model, serving_dtype
from gradus.trainer.ratios import drift_metrics
from gradus.trainer.step import GradientStep, Observer, StepLoss, merge_losses
from gradus.trainer.tensors import TrainTensors
from gradus.trainer.throughput import Stopwatch, WorkMeter
from gradus.wire.micro_batch import MicroBatch

_MAX_SKIPPED_STEPS = 5
"""Steps in a row with non-finite gradients after which the run ends."""


@dataclass(frozen=True)
class Learner:
    """Owns the policy and everything that changes it."""

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
    needs_reference: bool = False
    """True if the loss needs reference logprobs."""
    reference: Reference | None = None
    """The initial weights, where they are what the loss needs."""
    load: ExpertLoad | None = None
    """Of a mixture of experts."""

    @classmethod
    def build(
        cls,
        base: ModelConfig,
        settings: TrainerConfig | SftConfig,
        loss: learning.LossConfig,
        *,
        max_steps: int,
        world: World,
        is_resumed: bool = False,
        is_reference_served: bool = False,
    ) -> Self:
        """Load `base` and get it ready to learn; schedules end at `max_steps`.

        `is_resumed` leaves out what the checkpoint holds that is read next. `is_reference_served`
        says that batches bring every reference logprob that the loss needs.
        """
        settings = with_rate(settings, base.name)[0]
        dtype = serving_dtype(settings.compute_dtype)
        token_loss = build_loss(loss)
        keeps_reference = needs_reference(token_loss) and not is_reference_served
        policy = build_policy(
            base, settings, world, dtype, is_resumed=is_resumed, keeps_reference=keeps_reference
        )
        model = policy.model
        reference = None
        if keeps_reference:
            reference = build_reference(policy, base, settings, world, dtype)
        return cls(
            base=base,
            settings=settings,
            world=world,
            model=model,
            policy=policy,
            gradients=GradientStep(
                policy,
                token_loss,
                world,
                sync=sync_on(world.device, settings.parallel),
                aggregation=loss.aggregation,
            ),
            optimizer=PolicyOptimizer(
                policy,
                settings.optimizer,
                max_steps=max_steps,
                max_skipped_steps=_MAX_SKIPPED_STEPS,
                world=world,
            ),
            meter=WorkMeter.build(model, world, dtype, settings.peak_teraflops),
            needs_reference=needs_reference(token_loss),
            reference=reference,
            load=ExpertLoad.of(policy, world.device, moves_biases=_bias_rate(settings) > 0),
        )

    @property
    def dtype(self) -> torch.dtype:
        return serving_dtype(self.settings.compute_dtype)

    @property
    def vocabulary(self) -> int:
        return vocabulary_size(self.model)

    @cached_property
    def origin(self) -> Origin:
        """What is trained; where some of it stays frozen, rank 0 digests the model's files."""
        settings = self.settings
        is_frozen = settings.lora is not None or self.reference is not None
        return Origin(
            model=_located(self.base).model_dump(mode="json"),
            compute_dtype=settings.compute_dtype,
            lora=None if settings.lora is None else settings.lora.model_dump(mode="json"),
            base_sha256=base_digest(self.model) if is_frozen and self.world.is_first else None,
        )

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.policy, self.optimizer, self.world, self.origin)

    def observed_by(self, observe: Observer) -> Self:
        """The same learner, which tells of every forward that learns."""
        return replace(self, gradients=self.gradients.observed_by(observe))

    def learn(
        self, step: int, updates: Sequence[Sequence[MicroBatch]], watch: Stopwatch
    ) -> tuple[StepLoss, Update]:
        """Change the weights once for each update, unless its gradients are not finite."""
        losses, done = [], []
        scored, metrics = self._recomputed(step, self._scored(updates, watch), watch)
        for micro_batches in scored:
            with watch.measure("forward_backward"):
                losses.append(self.gradients.run(micro_batches))
            with watch.measure("optimize"):
                done.append(self.optimizer.step(step))
        loss = merge_losses(losses)
        if self.load is not None:
            changed = not all(update.is_skipped for update in done)
            metrics |= self.load.take(_bias_rate(self.settings) if changed else 0.0)
        loss = replace(loss, metrics={**loss.metrics, **metrics})
        return loss, merge_updates(done)

    def _scored(
        self, updates: Sequence[Sequence[MicroBatch]], watch: Stopwatch
    ) -> Sequence[Sequence[MicroBatch]]:
        """The batch with the reference logprobs that the loss needs; ConfigError without any."""
        if self.reference is not None:
            with watch.measure("score"):
                return [self.reference.score(micro_batches) for micro_batches in updates]
        if self.needs_reference:
            members = self.gradients.count(list(chain.from_iterable(updates)))
            if members["rl"] and not members["scored"]:
                raise ConfigError(
                    "trainer.loss pulls towards the model of algo.reference, but no token of the "
                    "batch has reference logprobs; let your algorithm write them, or leave "
                    "algo.reference out: the trainer then computes those of the initial weights"
                )
        return updates

    def _recomputed(
        self, step: int, updates: Sequence[Sequence[MicroBatch]], watch: Stopwatch
    ) -> tuple[Sequence[Sequence[MicroBatch]], dict[str, float]]:
        """The batch with what the policy says of it before its first update, where that is asked
        for, and how far that is from what the engine said."""
        if not getattr(self.settings, "recompute_logprobs", False):
            return updates, {}
        with watch.measure("score"):
            note, device = TrainTensors.with_proximal, self.world.device
            found = [scored(self.policy, part, device, note) for part in updates]
            return found, drift_metrics(list(chain.from_iterable(found)), step, self.world)

    def adapter_files(self) -> dict[str, bytes]:
        """The files of the adapter directory except its tensors; none without adapters."""
        lora = self.settings.lora
        if lora is None:
            return {}
        return adapter_files(self.model, lora, self.base.name, self.origin.base_sha256)

    def save(self, run_dir: RunDirectory, files: Mapping[str, bytes]) -> None:
        """Write the final model with `files` beside it, and the adapters where there are some."""
        with busy("saving the model", DISK_SECONDS):
            save = partial(save_model, self.model, self.world, self.dtype)
            save(run_dir.model, files)
            if self.settings.lora is not None:
                save(run_dir.adapter, self.adapter_files(), is_adapter=True)


def _bias_rate(settings: TrainerConfig | SftConfig) -> float:
    return settings.router_bias_rate if isinstance(settings, TrainerConfig) else 0.0


def _located(model: ModelConfig) -> ModelConfig:
    """The same model wherever the checkpoint is read: folders are named from the root."""
    named = {"name": model.name, "tokenizer": model.tokenizer}
    folders = [key for key, value in named.items() if value is not None and Path(value).is_dir()]
    return model.model_copy(update={key: str(Path(str(named[key])).absolute()) for key in folders})

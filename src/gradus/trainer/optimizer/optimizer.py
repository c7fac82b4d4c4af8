"""One optimizer step: the rate of its schedule, clipping over all ranks, and a gate for NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gradus.config import learning
from gradus.errors import CorruptStateError, GradusError
from gradus.log import get_logger
from gradus.trainer.distributed import World, named_failures, whole_tensor
from gradus.trainer.optimizer.parameter_kinds import by_mesh, trained_parameters
from gradus.trainer.optimizer.update_rules import build_update_rules

logger = get_logger(__name__)


@dataclass(frozen=True)
class Update:
    """What one call of `PolicyOptimizer.step` did."""

    grad_norm: float
    """Over all parameters and ranks, before clipping."""
    lr: float
    is_skipped: bool
    """True when gradients were not finite and nothing changed."""


def merge_updates(updates: Sequence[Update]) -> Update:
    """The updates of one batch as one: the mean norm, the rate that all had."""
    if len(updates) == 1:
        return updates[0]
    return Update(
        grad_norm=fmean(update.grad_norm for update in updates),
        lr=updates[0].lr,
        is_skipped=any(update.is_skipped for update in updates),
    )


class PolicyOptimizer:
    """Owns the moments of every trained parameter and the count of skipped updates.

    Made after the model is sharded: moments are split over ranks like their parameters.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        config: learning.OptimizerConfig,
        *,
        max_steps: int,
        max_skipped_steps: int,
        world: World,
    ) -> None:
        self._trained = trained_parameters(policy)
        self._parameters = [trained.parameter for trained in self._trained]
        self._config = config
        self._max_steps = max_steps
        self._max_skipped_steps = max_skipped_steps
        self._world = world
        self._skipped_in_a_row = 0
        self.num_skipped = 0
        self.rules = build_update_rules(config, self._trained)

    def step(self, step: int) -> Update:
        """Clip, update and clear the gradients; all ranks skip together when one is not finite.

        Refuses to continue after `max_skipped_steps` skips in a row.
        """
        lr = learning_rate(self._config, step, self._max_steps)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        total_norm = self._total_norm(gradients)
        norm = float(total_norm)
        is_finite = self._world.all_agree(math.isfinite(norm))
        if is_finite:
            for parameters in by_mesh(self._parameters):
                clip_grads_with_norm_(parameters, self._config.max_grad_norm, total_norm)
            self._update(lr)
        for rule in self.rules:
            rule.zero_grad(set_to_none=True)
        self._count(is_skipped=not is_finite, step=step, norm=norm)
        return Update(grad_norm=norm, lr=lr, is_skipped=not is_finite)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, as tensors by name.

        Moments are the live tensors, split over ranks, so that `torch.distributed.checkpoint.load`
        can read into them in place. Rates and decays are not state: they come from the config.
        """
        state = {
            f"{trained.name}.{key}": value
            for trained in self._trained
            for rule in self.rules
            for key, value in rule.state.get(trained.parameter, {}).items()
        }
        return state | {
            "num_skipped": torch.tensor(self.num_skipped),
            "skipped_in_a_row": torch.tensor(self._skipped_in_a_row),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` gave; CorruptStateError where entries do not match."""
        present = self.state_dict()
        odd = sorted(present.keys() ^ state.keys())
        if odd:
            raise CorruptStateError(
                f"optimizer state: {odd[0]!r} ({len(odd)} in all) is missing or unexpected; "
                "resume with the optimizer and the trained parameters of the checkpoint"
            )
        for name, value in present.items():
            if value is not state[name]:
                value.copy_(state[name])
        self.num_skipped = int(state["num_skipped"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])

    def _update(self, lr: float) -> None:
        for rule in self.rules:
            for group in rule.param_groups:
                group["lr"] = lr
            with named_failures("update the weights"):
                rule.step()

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        with named_failures("add up the gradient norm"):
            norms = [whole_tensor(get_total_norm(part)) for part in by_mesh(gradients)]
            return norms[0] if len(norms) == 1 else get_total_norm(norms)

    def _count(self, *, is_skipped: bool, step: int, norm: float) -> None:
        if not is_skipped:
            self._skipped_in_a_row = 0
            return
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        logger.warning("step %d: gradient norm is %s; the update is skipped", step, norm)
        if self._skipped_in_a_row >= self._max_skipped_steps:
            raise GradusError(
                f"gradients were not finite in {self._skipped_in_a_row} steps in a row, the last "
                f"of them step {step}; lower the learning rate or look at the batches"
            )


def learning_rate(config: learning.OptimizerConfig, step: int, max_steps: int) -> float:
    """The rate of step `step` (from 0): up over the warm-up, then along the schedule.

    A function of the step alone, so that neither a skipped update nor a resume shifts it. The last
    step has the lowest rate; where that is 0, the step after it, since 0 would train nothing.

        >>> learning_rate(learning.AdamWConfig(lr=1.0, warmup_steps=2), 0, 10)
        0.5
    """
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.peak_lr
    last = max_steps - 1 if config.min_lr_ratio else max_steps
    remaining = max(1, last - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / remaining)
    if config.schedule == "linear":
        height = 1.0 - progress
    else:
        height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.peak_lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)

"""AdamW on float32 master weights, with a schedule, clipping over all ranks, and a gate for NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gradus.config.trainer import OptimizerConfig
from gradus.errors import GradusError
from gradus.log import get_logger
from gradus.trainer.distributed import World, named_failures

logger = get_logger(__name__)


def learning_rate(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """The rate of step `step` (from 0): up over the warm-up, then along the schedule.

    A function of the step alone, so that a skipped update does not shift it.

        >>> learning_rate(OptimizerConfig(lr=1.0, warmup_steps=2), 0, 10)
        0.5
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    remaining = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / remaining)
    if config.schedule == "linear":
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Update:
    """What one call of `PolicyOptimizer.step` did."""

    grad_norm: float
    """Over all parameters and ranks, before clipping."""
    lr: float
    is_skipped: bool
    """True when gradients were not finite and nothing changed."""


class PolicyOptimizer:
    """Owns the moments of every parameter and the count of skipped updates.

    >>> update = optimizer.step(step=0)  # doctest: +SKIP
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        *,
        max_steps: int,
        max_skipped_steps: int,
        world: World,
    ) -> None:
        self._parameters = [p for _, p in named_parameters if p.requires_grad]
        self._config = config
        self._max_steps = max_steps
        self._max_skipped_steps = max_skipped_steps
        self._world = world
        self._skipped_in_a_row = 0
        self.num_skipped = 0
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters if p.ndim >= 2]},
            # Norms and biases have no scale that decay could control.
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, step: int) -> Update:
        """Clip, update and clear the gradients; all ranks skip together when one is not finite.

        Refuses to go on after `max_skipped_steps` skips in a row.
        """
        lr = learning_rate(self._config, step, self._max_steps)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = self._total_norm(gradients)
        is_finite = self._world.all_agree(math.isfinite(norm))
        if is_finite:
            clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, torch.tensor(norm))
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._count(is_skipped=not is_finite, step=step, norm=norm)
        return Update(grad_norm=norm, lr=lr, is_skipped=not is_finite)

    def _total_norm(self, gradients: list[Tensor]) -> float:
        with named_failures("add up the gradient norm"):
            norm = get_total_norm(gradients)
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return float(whole)

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
                f"of them step {step}; lower the learning rate or look at the batches, or raise "
                "max_skipped_steps"
            )

"""The learning rate of each step: a warm-up, then a schedule down to its floor."""

from __future__ import annotations

import math

from gradus.config.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """The rate of step `step` (from 0): up over the warm-up, then along the schedule.

    A function of the step alone, so that neither a skipped update nor a resume shifts it.

        >>> learning_rate(AdamWConfig(lr=1.0, warmup_steps=2), 0, 10)
        0.5
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    remaining = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / remaining)
    if config.schedule == "linear":
        height = 1.0 - progress
    else:
        height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)

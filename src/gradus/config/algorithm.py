"""How rewards become advantages and loss weights."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.reference import ReferenceConfig


class AlgorithmConfig(StrictConfig):
    """A registered algorithm or a class of your own."""

    type: str = "grpo"
    """`grpo`, `max_rl`, `hierarchical_grpo`, `rae`, `echo`, `opd`, `opsd`, `sft`, or
    "package.module:Class"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the algorithm, e.g. {scale_by_std = true}."""
    reference: ReferenceConfig | None = None
    """The frozen teacher of `opd`, or a model that your own algorithm asks. None means none: `opsd`
    asks the policy itself, and the player of `sft` stands under `agents.<role>`."""
    scoring_timeout_seconds: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """How long the algorithm may take for one episode or one group, waits for its judges included;
    then it fails as `scoring_timeout`."""

"""A frozen model that another server serves: a teacher that scores or plays."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradus.config.schema.base import StrictConfig

URL_PATTERN = "^https?://"


class ReferenceConfig(StrictConfig):
    """Where a frozen model is served, with vLLM's `/v1/completions` and `/tokenize` routes."""

    base_url: str = Field(pattern=URL_PATTERN)
    """Address of the server, without "/v1"."""
    model: str = Field(min_length=1)
    """Name of the model there; its tokenizer must be the policy's."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the server's key. None means no key."""
    max_concurrent_requests: int = Field(16, ge=1)
    """Most requests at once."""
    timeout_seconds: float = Field(120.0, gt=0)
    """Deadline of one request, waiting for its turn not counted."""


# ---- How rewards become advantages and loss weights.
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

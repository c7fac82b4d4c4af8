"""Which errors of an episode are worth another attempt, and how many."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradus.config.base import StrictConfig

RETRIED_ERRORS = (
    "EnvironmentLost",
    "InterceptionError",
    "ProviderError",
    "SandboxError",
    "TunnelError",
    "invalid_episode",
    "invalid_tokens",
    "timeout",
    "episode_timeout",
)
"""Infrastructure, invalid answers of the model or of the environment, and deadlines."""


class ErrorPolicyConfig(StrictConfig):
    """Errors on the list are tried again; every other error is recorded on the episode."""

    type: str = "listed"
    """`listed`, which follows the keys below, or "package.module:Class"."""
    retry_on: list[str] = Field(default_factory=lambda: list(RETRIED_ERRORS))
    """Types of errors, as they stand in `error.type` of the episode's record."""
    retries: int = Field(2, ge=0)
    """How often the whole episode is played again after such an error."""
    backoff_seconds: float = Field(1.0, ge=0)
    """Wait before the first retry; doubled with each one, up to a minute."""
    agent_retries: int = Field(0, ge=0)
    """How often the environment itself runs one agent again after such an error, before the
    episode as a whole is tried again; what other agents played is kept."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a policy of your own, which also gets this section."""

"""A frozen model that another server serves: a teacher that scores or plays."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig

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

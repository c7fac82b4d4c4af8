"""How tokens are drawn from the policy."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig


class SamplingConfig(StrictConfig):
    """Sampling settings of one source; None means the value of the enclosing section."""

    temperature: float | None = Field(None, ge=0)
    """Divides the logits before sampling; the trainer divides by the same number. 0 takes the most
    likely token, which an evaluation may and a source that trains may not."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; below 1 the trained distribution is not the sampled one."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of one model turn."""
    extra_body: dict[str, object] = Field(default_factory=dict)
    """Further settings that the engine understands, passed through."""

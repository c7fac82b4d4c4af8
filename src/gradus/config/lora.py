"""Low-rank adapters: what is trained in place of the whole model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradus.config.base import StrictConfig


class LoraConfig(StrictConfig):
    """Low-rank adapters beside frozen linear layers (Hu et al., arXiv:2106.09685)."""

    rank: int = Field(16, ge=1, le=512)
    """Inner dimension of an adapter."""
    alpha: int = Field(32, ge=1)
    """The adapter's output is multiplied by alpha / rank."""
    target_modules: list[str] | None = Field(None, min_length=1)
    """Last parts of the names of the linear layers to adapt. None means all of attention and
    MLP."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Must be 0: with dropout the trained distribution is not the sampled one."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Must be empty: vLLM serves no whole modules beside an adapter."""


class ServedLoraConfig(LoraConfig):
    """Low-rank adapters, and how they reach inference."""

    serve: Literal["adapter", "merged"] = "adapter"
    """`adapter` publishes only the adapter, which vLLM applies beside the base model; `merged`
    publishes whole weights with the adapter added, for models whose adapters vLLM does not take."""

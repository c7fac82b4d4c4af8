"""Low-rank adapters: what is trained in place of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.problems import Problem
from gradus.config.schema import KeyPath


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


def lora_problems(path: KeyPath, lora: LoraConfig | None) -> Iterator[Problem]:
    """What cannot be trained exactly, or not served."""
    if lora is None:
        return
    if lora.dropout > 0:
        yield Problem(
            (*path, "dropout"),
            f"{lora.dropout} would make the policy's logprobs random, and ratios with them; use 0",
        )
    if lora.modules_to_save:
        yield Problem(
            (*path, "modules_to_save"),
            f"{lora.modules_to_save} cannot be served: vLLM takes low-rank factors only, no whole "
            "modules beside them; leave it empty, or train without lora",
        )

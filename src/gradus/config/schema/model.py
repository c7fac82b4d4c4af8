"""Which model is trained and served, and how long its sequences may be."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradus.config.schema.base import StrictConfig


class ModelConfig(StrictConfig):
    """The policy's initial weights and its tokenizer."""

    name: str
    """Path of a Hugging Face model directory, or its name on the hub."""
    tokenizer: str | None = None
    """Path or name of the tokenizer. None means that of the model."""
    max_length_tokens: int = Field(2048, ge=8)
    """Longest prompt plus reply, in tokens; the engine's context and the longest sample."""
    renderer: str | dict[str, Any] = "auto"
    """Name of the renderer of the `renderers` package ("qwen3", "default", ...), or a table with
    its settings, e.g. {name = "qwen3", enable_thinking = false}. "auto" finds it from the model's
    name or its chat template, and falls back to the plain chat template, which reads no tool
    calls."""
    trust_remote_code: bool = False
    """Run Python code that the model directory ships. Off unless you trust its author."""


def renderer_settings(model: ModelConfig) -> dict[str, Any]:
    """The renderer as a table with a name.

    >>> renderer_settings(ModelConfig(name="m", renderer="qwen3"))
    {'name': 'qwen3'}
    """
    if isinstance(model.renderer, str):
        return {"name": model.renderer}
    return {"name": "auto", **model.renderer}

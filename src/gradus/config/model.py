"""Which model is trained and served, and how long its sequences may be."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig


class ModelConfig(StrictConfig):
    """The policy's initial weights and its tokenizer."""

    name: str
    """Path of a Hugging Face model directory, or its name on the hub."""
    tokenizer: str | None = None
    """Path or name of the tokenizer. None means that of the model."""
    max_length_tokens: int = Field(2048, ge=8)
    """Longest prompt plus reply, in tokens; the engine's context and the longest sample."""
    renderer: str = "auto"
    """Name of the renderer of the `renderers` package ("qwen3", "default", ...); "auto" resolves
    from the model and falls back to the chat template with a warning."""
    trust_remote_code: bool = False
    """Run Python code that the model directory ships. Off unless you trust its author."""

"""Which model is trained and served, and how long its sequences may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from gradus.config.schema.base import StrictConfig

CHAT_TEMPLATE = "default"
"""The renderer that uses the model's own chat template."""
_RETENTION = ("tool_cycle", "all")
_OF_THE_TEMPLATE = ("tool_parser", "reasoning_parser")
_SWITCHES = ("enable_thinking", "preserve_thinking", "clear_thinking")


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
    its settings, e.g. {name = "qwen3", enable_thinking = false, thinking_retention = "all"} or
    {name = "default", tool_parser = "hermes", reasoning_parser = "think"}. "auto" finds it from the
    model's name or its chat template, and falls back to the plain chat template, which reads no
    tool calls. With thinking_retention = "all" a conversation keeps the reasoning of earlier turns;
    without, it splits into a sample for each turn."""
    trust_remote_code: bool = False
    """Run Python code that the model directory ships: of a folder on this disk, which no push to
    the hub changes. Off unless you trust its author."""

    @property
    def renderer_settings(self) -> dict[str, Any]:
        """The renderer as a table with a name.

        >>> ModelConfig(name="m", renderer="qwen3").renderer_settings
        {'name': 'qwen3'}
        """
        if isinstance(self.renderer, str):
            return {"name": self.renderer}
        return {"name": "auto", **self.renderer}

    @staticmethod
    def renderer_problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Settings of a renderer that cannot work: the key, and why. The renderer checks the rest.

        >>> list(ModelConfig.renderer_problems({"name": "qwen3", "thinking_retention": "all"}))
        []
        """
        name, retention = settings["name"], settings.get("thinking_retention")
        if not isinstance(name, str):
            yield "name", f"{name!r} must be text in quotes"
            return
        if retention is not None and retention not in _RETENTION:
            yield "thinking_retention", f'{retention!r} is not one of "tool_cycle" or "all"'
        elif retention is not None and name == CHAT_TEMPLATE:
            yield (
                "thinking_retention",
                f"{retention!r}: the plain chat template decides itself which reasoning it takes "
                'out; use the renderer of the model\'s family, e.g. "qwen3", or remove it',
            )
        for key in _OF_THE_TEMPLATE:
            if key in settings and name not in (CHAT_TEMPLATE, "auto"):
                yield key, f"{name!r} has its own parser; only {CHAT_TEMPLATE!r} takes one"
            elif key in settings and not isinstance(settings[key], str | None):
                yield key, f"{settings[key]!r} must be text in quotes"
        for key in _SWITCHES:
            if not isinstance(settings.get(key), bool | None):
                yield key, f"{settings[key]!r} must be true or false, without quotes"

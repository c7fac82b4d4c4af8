"""The root of what the user writes for `gradus serve`."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.inference import InferenceConfig


class ServeConfig(StrictConfig):
    """One model behind an OpenAI-compatible server, for ordinary clients."""

    model: str
    """A Hugging Face model directory, its name on the hub, a run, or one of its checkpoints."""
    name: str | None = Field(None, min_length=1)
    """The model's name in requests and in `/v1/models`. None means that of the folder or run."""
    tokenizer: str | None = None
    """Path or name of the tokenizer. None means that of the model."""
    trust_remote_code: bool = False
    """Run Python code that the model directory ships. Off unless you trust its author."""
    max_length_tokens: int | None = Field(None, ge=8)
    """Longest prompt plus reply, in tokens. None means what the model and the memory allow."""
    tool_parser: str | None = "auto"
    """vLLM's parser of tool calls. "auto" goes by the model; None leaves them in the text."""
    reasoning_parser: str | None = "auto"
    """vLLM's parser of reasoning. "auto" goes by the model; None leaves it in the text."""
    seed: int = 0
    """Seed of the engine."""
    inference: InferenceConfig = InferenceConfig()
    """The server: host, port (0: the system chooses), memory, further engine arguments."""

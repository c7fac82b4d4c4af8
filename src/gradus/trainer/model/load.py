"""Hugging Face models and tokenizers, by path or name, ready to train."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from gradus.config.model import ModelConfig
from gradus.errors import ConfigError
from gradus.trainer.model.attention import ATTENTION_NAME


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The initial weights in float32, with packed attention; ConfigError when there are none."""
    # Logs are read line by line; a bar that rewrites its line does not belong there.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.name,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.name!r} cannot be loaded: {error}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model {config.name!r} ({type(model).__name__}) does not take its attention from "
            "transformers' registry, which packing needs; use another model"
        )
    # Without dropout: the trained distribution must be the sampled one.
    model.train(False)
    torch.nn.Module.to(model, device)
    return model


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of the policy; ConfigError when there is none."""
    name = config.tokenizer or config.name
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {error}") from error

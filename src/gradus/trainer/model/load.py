"""Hugging Face models and tokenizers, by path or name, ready to train."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from gradus.config import ModelConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.trainer.model.attention import ATTENTION_NAME
from gradus.trainer.model.gpu.flash import choose_flash_attention
from gradus.trainer.model.probe import refuse_inexact

_LEARNED_POSITIONS = frozenset({"wpe", "embed_positions", "position_embeddings"})
"""Names of embeddings with a row for each position."""
_SEPARATE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers for which `packed_attention` does all that mixes tokens."""


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The initial weights in float32, with packed attention; ConfigError when there are none.

    They stay in CPU memory: sharding moves to `device` one layer after the other, so that a GPU
    never holds a whole model.
    """
    # Logs are read line by line; a bar that rewrites its line does not belong there.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = _load_complete(config)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model {config.name!r} ({type(model).__name__}) does not take its attention from "
            "transformers' registry, which packing needs; use another model"
        )
    refuse_leaking_layers(model)
    refuse_changing_positions(model, config.max_length_tokens)
    refuse_missing_positions(model, config.max_length_tokens)
    choose_flash_attention(device)
    # Without dropout: the trained distribution must be the sampled one.
    model.train(False)
    refuse_inexact(model)
    return model


def refuse_leaking_layers(model: PreTrainedModel) -> None:
    """Only attention keeps the samples of a packed row apart."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    leaking = sorted(set(kinds) - _SEPARATE_LAYERS)
    if leaking:
        raise ConfigError(
            f"model {model.config.name_or_path!r} has layers of the kind {leaking[0]!r}, which "
            "would carry state from one packed sample into the next; use another model"
        )


def refuse_changing_positions(model: PreTrainedModel, max_length_tokens: int) -> None:
    """Some position encodings change beyond a length; the longest sample of a packed row would
    change them for all."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    # Flat, or one for each kind of layer.
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        kind = rope.get("rope_type", "default")
        if "dynamic" not in kind and kind != "longrope":
            continue
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length_tokens > limit:
            raise ConfigError(
                f"model {model.config.name_or_path!r} has {kind!r} positions, which change beyond "
                f"{limit} tokens and cannot be packed there; lower model.max_length_tokens = "
                f"{max_length_tokens} to {limit} or less"
            )


def refuse_missing_positions(model: PreTrainedModel, max_length_tokens: int) -> None:
    """Learned positions end somewhere; a longer sample would fail in the middle of a run."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if limit is not None and max_length_tokens > limit and names & _LEARNED_POSITIONS:
        raise ConfigError(
            f"model {model.config.name_or_path!r} has learned {limit} positions; lower "
            f"model.max_length_tokens = {max_length_tokens} to {limit} or less"
        )


def _load_complete(config: ModelConfig) -> PreTrainedModel:
    """The model with every tensor from disk; transformers would only warn about a missing one."""
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            config.name,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise CorruptStateError(
            f"model {config.name!r}: its weights are damaged ({error}); fetch it again"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.name!r} cannot be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise CorruptStateError(
            f"model {config.name!r} lacks {len(missing)} tensors, the first is {missing[0]!r}, "
            "which would start at random; fetch it again"
        )
    return model


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of the policy; ConfigError when there is none."""
    name = config.tokenizer or config.name
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {error}") from error

"""A small model of each family that can be trained, with large random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gradus.config import ModelConfig

WINDOW = 5
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
PHI_LONG = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3 positions": ("llama", {"rope_parameters": LLAMA3}),
    "yarn positions": ("llama", {"rope_parameters": YARN}),
    "attention dropout": ("llama", {"attention_dropout": 0.5}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2 with windows": ("qwen2", {**MIXED, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma3 with windows": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3 with windows": ("olmo3", MIXED),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "granite": ("granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.3}),
    "gpt_neox": ("gpt_neox", {"attention_dropout": 0.3, "hidden_dropout": 0.3}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "scale_attn_weights": False}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": WINDOW}),
    "qwen2 experts without windows": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
}


def build_family(directory: Path, family: str, options: dict[str, Any]) -> PreTrainedModel:
    """A model of the family with large random weights, saved to the directory."""
    torch.manual_seed(0)
    defaults = AutoConfig.for_model(family)
    shape = {name: value for name, value in SHAPE.items() if hasattr(defaults, name)}
    config = AutoConfig.for_model(family, **(shape | options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.05
            parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(directory)
    model.train(False)
    return model


def family_config(directory: Path) -> ModelConfig:
    """For samples as long as every model of this shape can read."""
    return ModelConfig(name=str(directory), max_length_tokens=SHAPE["max_position_embeddings"])

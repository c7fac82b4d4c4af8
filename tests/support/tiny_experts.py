"""A tiny model with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gradus.testing.tiny_model import HEAD_SIZE, build_tiny_tokenizer

NUM_EXPERTS = 4
EXPERT_SIZE = 64


def build_tiny_moe_model(
    directory: Path, *, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Path:
    """Write a model of two layers with four experts, two for each token; gives the directory.

    Random weights that depend on nothing but the shape; `settings` go to the model's config.
    """
    tokenizer = build_tiny_tokenizer(directory)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": EXPERT_SIZE,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen3MoeConfig(**(shape | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    torch.nn.Module.to(model, dtype=dtype).save_pretrained(directory)
    return directory

"""A tiny Qwen3-VL with the character tokenizer and an image processor, made without a hub."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from gradus.companions import show_torchvision
from gradus.testing.tiny_model import (
    CHAT_TEMPLATE,
    HEAD_SIZE,
    build_tiny_tokenizer,
    let_older_versions_read,
)

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH_SIZE, MERGE_SIZE = 14, 2
"""Pixels of a patch's side, and patches of a placeholder's: 70 x 98 pixels are 5 x 7 patches, which
the processor makes an even number of each."""
IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ part if part is string else part.text }}",
    "{{ part if part is string else part.text if part.type == 'text' else "
    "'<|vision_start|><|image_pad|><|vision_end|>' }}",
)


def build_tiny_image_model(
    directory: Path,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 4,
    max_length_tokens: int = 2048,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a randomly initialised Qwen3-VL with all its files; returns `directory`.

    transformers, vLLM and the `qwen3-vl` renderer load it like a real one. Where torchvision does
    not fit torch, `show_torchvision` goes before the import of this module. The global random state
    stays.
    """
    show_torchvision()
    models: Any = importlib.import_module("transformers")
    tokenizer: Any = build_tiny_tokenizer(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.chat_template = IMAGE_CHAT_TEMPLATE
    _save_processor(models, tokenizer, directory)
    text = {"hidden_size": hidden_size, "num_hidden_layers": num_layers}
    config = _config(models, tokenizer, {**text, "max_position_embeddings": max_length_tokens})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.Qwen3VLForConditionalGeneration(config)
    model.to(dtype)
    stop_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = models.GenerationConfig(
        eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    let_older_versions_read(directory)
    return directory


def _save_processor(models: Any, tokenizer: Any, directory: Path) -> None:
    """Of images of at most 140 x 140 pixels, which are 25 placeholders; larger ones are shrunk."""
    sides = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    bounds = {"shortest_edge": 28 * 28, "longest_edge": 140 * 140}
    models.Qwen3VLProcessor(
        image_processor=models.Qwen2VLImageProcessor(**sides, **colours, size=bounds),
        tokenizer=tokenizer,
        video_processor=models.Qwen3VLVideoProcessor(**sides, **colours),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


def _config(models: Any, tokenizer: Any, text: dict[str, Any]) -> Any:
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    hidden_size = text["hidden_size"]
    num_heads = hidden_size // HEAD_SIZE
    rotary = {"rope_type": "default", "rope_theta": 10_000.0}
    return models.Qwen3VLConfig(
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "intermediate_size": hidden_size * 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // 2,
            "head_dim": HEAD_SIZE,
            "rope_parameters": {**rotary, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 3,
            "hidden_size": hidden_size // 2,
            "intermediate_size": hidden_size,
            "num_heads": num_heads // 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )

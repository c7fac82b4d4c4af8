"""The memory that `gradus check` computes is what a forward and backward on a CPU allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import build_sample
from held_memory import held
from image_families import PATCH, image_folder, image_policy, row_of, seen
from model_families import CPU, VOCABULARY, family_folder, our_policy

from gradus.config import LoraConfig, TrainerConfig
from gradus.config.families import TRAINED, TRAINED_ON_CPUS, WITH_IMAGES
from gradus.plan.memory.kept import measured_families
from gradus.plan.memory.prediction import footprint_of
from gradus.plan.memory.shape import read_model_shape
from gradus.trainer.images.tower import tower_parameters
from gradus.trainer.model.layers import decoder_layers, recompute_layers
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch

KINDS = (
    *("gpt2", "mistral with a window", "qwen3", "gemma2 with caps", "qwen3_moe", "gpt_oss"),
    *("minicpm3", "deepseek_v3", "qwen3_next", "mamba2", "nemotron_h"),
    *("falcon_h1", "granitemoehybrid", "lfm2_moe"),
)
"""Of layers, each at least once."""
LENGTHS = (170, 173, 172)
"""Neither in the order of their lengths nor in whole chunks."""


def estimated_over_allocated(case: str, way: str, dtype: torch.dtype = torch.float32) -> float:
    """Of activations and logits of one micro batch."""
    mode, _, adapters = way.partition(", ")
    parallel = {"activation_checkpointing": mode}
    dtype_name = str(dtype).removeprefix("torch.")
    settings: dict[str, Any] = {"micro_batch_tokens": sum(LENGTHS), "compute_dtype": dtype_name}
    policy = our_policy(case, dtype)
    if adapters:
        add_adapters(policy.model, LoraConfig(rank=4), dtype)
        policy.model.to(dtype)
        settings["lora"] = {"rank": 4}
    recompute_layers(decoder_layers(policy.model), mode)  # type: ignore[arg-type]
    batch = [build_sample(n, prompt_length=1, seed=n, vocabulary=VOCABULARY) for n in LENGTHS]
    tensors = TrainTensors.build(MicroBatch.join(batch), CPU)
    policy(tensors).logprobs.sum().backward()
    shape = read_model_shape(family_folder(case))
    assert shape is not None
    trainer = TrainerConfig.model_validate({**settings, "parallel": parallel})
    found = footprint_of(shape, trainer, on_gpu=False, longest=max(LENGTHS))
    return (found.working["activations"] + found.working["logits"]) / held(policy, tensors).peak


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("way", ["none", "selective"])
def test_the_estimate_is_within_a_tenth_of_what_is_allocated(case: str, way: str) -> None:
    assert 0.9 < estimated_over_allocated(case, way) < 1.1


@pytest.mark.parametrize(
    ("way", "dtype"),
    [("full", torch.float32), ("none, adapters", torch.float32), ("selective", torch.bfloat16)],
)
def test_the_estimate_knows_every_way_of_training(way: str, dtype: torch.dtype) -> None:
    assert 0.9 < estimated_over_allocated("qwen3_moe", way, dtype) < 1.1


def test_all_families_that_are_trained_were_measured_but_one() -> None:
    assert (TRAINED | TRAINED_ON_CPUS) - WITH_IMAGES - measured_families() == {"llama4_text"}


def test_the_estimate_knows_what_a_trained_tower_keeps() -> None:
    """Beside the pixels, which exist before."""
    policy, found = image_policy("qwen3_vl"), [seen(100, (5, (8, 12))), seen(101, (5, (16, 16)))]
    tensors, patches = row_of(policy.model, found), 8 * 12 + 16 * 16
    peaks = []
    for trains in (True, False):
        for parameter in tower_parameters(policy.model):
            parameter.requires_grad_(trains)
        policy(tensors).logprobs.sum().backward()
        peaks.append(held(policy, tensors).peak)
    settings: dict[str, Any] = {"micro_batch_patches": patches, "compute_dtype": "float32"}
    shape = read_model_shape(image_folder("qwen3_vl"))
    assert shape is not None
    kept, stays = (
        footprint_of(
            shape,
            TrainerConfig.model_validate({**settings, "train_vision": trains}),
            on_gpu=False,
        ).working["images"]
        for trains in (True, False)
    )
    unset = str(footprint_of(shape, TrainerConfig(), on_gpu=False))
    assert unset.endswith("; images not counted, for micro_batch_patches is not set")
    assert stays == 4 * 2 * PATCH * patches
    assert 0.9 < (kept - stays) / (peaks[0] - peaks[1]) < 1.1

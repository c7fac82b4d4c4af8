"""A small model of each family that reads images, with random weights and random pixels."""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders import build_sample
from model_families import (
    DELTA,
    DELTA_HEADS,
    EXPERTS,
    GEMMA4,
    INPUTS_OF_LAYERS,
    SHAPE,
    SHARED,
    SHARED_KEYS,
    as_if_learned,
    distance,
    family_config,
    rounded,
)
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from gradus.config import LoraConfig
from gradus.config.families import TURNED
from gradus.trainer.images.pixels import Pixels, RowRule
from gradus.trainer.images.tower import reads_images, tower_parameters
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import adapted_layers, add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import ReadyMicroBatch, TrainTensors
from gradus.trainer.throughput import ModelFlops
from gradus.wire.images import ImageSpan
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import Sample

CPU = torch.device("cpu")
IMAGE = 90
"""Token of a placeholder, which samples hold elsewhere too."""
TOWER = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
PARTLY_TURNED = {
    **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
"""A quarter of a head of 32; vLLM takes images for text where the sections are not written."""
QWEN3 = {**TOWER, "out_hidden_size": 128, "num_position_embeddings": 64}
PATCH = 3 * 2 * 16 * 16
"""Numbers of one patch."""
GEMMA4_TOWER = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 64},
    **{"patch_size": 16, "pooling_kernel_size": 2, "default_output_length": 70},
    **{"use_clipped_linears": True, "standardize": True},
}
MOST_PATCHES = 16 * 16
"""To which a processor of Gemma 4 fills up what it makes of an image."""
IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen3_vl",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**QWEN3, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            **{**EXPERTS, "moe_intermediate_size": 96, "norm_topk_prob": True},
            "rope_parameters": {**MROPE, "mrope_interleaved": True},
        },
        {**QWEN3, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"rope_parameters": MROPE},
        {**TOWER, "out_hidden_size": 128, "window_size": 64, "fullatt_block_indexes": [1]},
    ),
    "qwen3_5 with images": (
        "qwen3_5",
        {**DELTA, **DELTA_HEADS, "rope_parameters": PARTLY_TURNED},
        QWEN3,
    ),
    "qwen3_5_moe with images": (
        "qwen3_5_moe",
        {**DELTA, **DELTA_HEADS, **EXPERTS, **SHARED, "rope_parameters": PARTLY_TURNED},
        QWEN3,
    ),
    "gemma4 with images": ("gemma4", {**GEMMA4, **INPUTS_OF_LAYERS, **SHARED_KEYS}, GEMMA4_TOWER),
}
"""`model_type`, then what text and tower have beside the usual shape."""
QWENS = [case for case in IMAGE_FAMILIES if case.startswith("qwen")]


@dataclass(frozen=True)
class Seen:
    """A sample with its images: of each the rows and columns of patches."""

    sample: Sample
    grids: tuple[tuple[int, int], ...] = ()


def build_image_family(
    directory: Path, case: str, *, seed: int = 0, **more: dict[str, Any] | int
) -> PreTrainedModel:
    """Saved to the directory; noise is added to what its code begins with. `more` are values of
    its config, those of `text_config` beside the usual ones."""
    family, text, tower = IMAGE_FAMILIES[case]
    torch.manual_seed(seed)
    shape: Any = more.pop("text_config", {})
    ids = {"image_token_id": IMAGE, "video_token_id": 91}
    ids |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
    config = AutoConfig.for_model(
        family,
        text_config=SHAPE | text | shape,
        vision_config=tower,
        **({"tie_word_embeddings": family == "gemma4"} | ids | more),
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.04 * torch.randn_like(parameter))
        if family == "gemma4":
            as_if_learned(model, 0.04)
    model.save_pretrained(directory)
    if family == TURNED:
        turn_experts(directory)
    model.train(False)
    return model


def turn_experts(directory: Path) -> None:
    """The layout of the published models in the place of that which transformers saves, or back."""
    file = directory / "model.safetensors"
    tensors = {
        name: it.mT.contiguous() if ".mlp.experts." in name else it
        for name, it in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def save_gemma4_processor(folder: Path, tokenizer: Any) -> dict[str, int]:
    """What makes pixels of images for the small Gemma 4, saved with the tokenizer, to which it
    gives the tokens of an image; what its config says of them."""
    words = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>"}
    words |= {"audio": "<|audio|>", "boa": "<|audio>", "eoa": "<audio|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": [*words.values(), "<|video|>"]})
    tokenizer._set_model_specific_special_tokens({f"{it}_token": words[it] for it in words})
    sides = {"patch_size": 16, "pooling_kernel_size": 2}
    models: Any = importlib.import_module("transformers")
    models.Gemma4Processor(
        feature_extractor=models.Gemma4AudioFeatureExtractor(),
        image_processor=models.Gemma4ImageProcessor(**sides, max_soft_tokens=70),
        video_processor=models.Gemma4VideoProcessor(**sides, max_soft_tokens=70),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    video = {"video_token_id": tokenizer.convert_tokens_to_ids("<|video|>")}
    return video | {
        ("eoa_token_index" if name == "eoa" else f"{name}_token_id"): (
            tokenizer.convert_tokens_to_ids(word)
        )
        for name, word in words.items()
    }


@cache
def image_folder(case: str) -> Path:
    """Files of a model of the family, for all tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="gradus_images_"))
    build_image_family(folder, case)
    return folder


def plain_image_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
        image_folder(case), dtype=torch.float32, attn_implementation="eager"
    )
    rounded(model, dtype).train(False)
    return model


def image_policy(case: str | Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """The trainer's, of a case or of a folder."""
    folder = image_folder(case) if isinstance(case, str) else case
    policy = PolicyModel(rounded(load_model(family_config(folder), CPU), dtype))
    fuse_layers(policy.model)
    return policy


def name_of(grid: tuple[int, int]) -> str:
    """Stands for the hash of an image of this size; one size is one image."""
    return f"{grid[0]:032x}{grid[1]:032x}"


def drawn(sha256: str, *, is_gemma: bool = False) -> dict[str, Tensor]:
    """What a processor would make of it, that of Gemma 4 or of Qwen."""
    rows, columns = int(sha256[:32], 16), int(sha256[32:], 16)
    random = torch.Generator().manual_seed(100 * rows + columns)
    if is_gemma:
        places = torch.tensor([(x, y) for y in range(rows) for x in range(columns)])
        empty = MOST_PATCHES - rows * columns
        pixels = torch.rand(rows * columns, PATCH // 2, generator=random)
        return {
            "pixel_values": torch.nn.functional.pad(pixels, (0, 0, 0, empty))[None],
            "image_position_ids": torch.nn.functional.pad(places, (0, 0, 0, empty), value=-1)[None],
        }
    return {
        "pixel_values": torch.randn(rows * columns, PATCH, generator=random),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


def drawn_for(model: PreTrainedModel, sha256: str) -> dict[str, Tensor]:
    return drawn(sha256, is_gemma=model.config.model_type == "gemma4")


def pixels_for(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Pixels:
    return Pixels(partial(drawn_for, model), RowRule.of(model), dtype)


def seen(length: int, *images: tuple[int, tuple[int, int]], seed: int | None = None) -> Seen:
    """A sample of this length; of each image where it begins, and its rows and columns."""
    sample = build_sample(
        length, prompt_length=1, seed=length if seed is None else seed, vocabulary=IMAGE
    )
    ids, mask = np.array(sample.arrays.token_ids), np.array(sample.arrays.loss_mask)
    spans = []
    for start, (rows, columns) in images:
        span = ImageSpan(name_of((rows, columns)), start, rows * columns // 4)
        ids[start : span.end], mask[start : span.end] = IMAGE, False
        spans.append(span)
    sample = sample.with_arrays(token_ids=ids, loss_mask=mask)
    return Seen(structs.replace(sample, images=spans), tuple(grid for _, grid in images))


def usual() -> list[Seen]:
    """Samples with no, one and two images, and the same image twice."""
    return [
        seen(40, (5, (4, 6))),
        seen(23),
        seen(70, (3, (2, 4)), (30, (6, 4))),
        seen(9),
        seen(65, (0, (4, 6))),
    ]


def row_of(model: PreTrainedModel, found: Sequence[Seen]) -> TrainTensors:
    micro_batch = MicroBatch.join([it.sample for it in found])
    micro_batch.check()
    return ReadyMicroBatch.of(micro_batch, CPU, pixels_for(model)).tensors


def with_images(policy: PolicyModel, batch: list[MicroBatch]) -> list[MicroBatch]:
    """Made ready, of a policy that reads images."""
    if not reads_images(policy.model):
        return batch
    pixels = pixels_for(policy.model)
    return [ReadyMicroBatch.of(it, CPU, pixels) for it in batch]


def image_logprobs(policy: PolicyModel, found: Sequence[Seen]) -> list[Tensor]:
    """Of each sample of one row, of what is learned of it."""
    scores = policy(row_of(policy.model, found))
    parts = torch.split(scores.logprobs, [len(it.sample) for it in found])
    return [part[targets(it)] for part, it in zip(parts, found, strict=True)]


def own_image_logprobs(model: PreTrainedModel, found: Sequence[Seen]) -> list[Tensor]:
    """The same by transformers alone, sample by sample."""
    alone = []
    for it in found:
        token_ids = torch.tensor(it.sample.arrays.token_ids, dtype=torch.int64)
        types = torch.zeros_like(token_ids)
        for span in it.sample.images:
            types[span.start : span.end] = 1
        inputs: dict[str, Any] = {}
        if it.grids:
            made = [drawn_for(model, span.sha256) for span in it.sample.images]
            inputs = {name: torch.cat([one[name] for one in made]) for name in made[0]}
            inputs["mm_token_type_ids"] = types[None]
        logits = model(input_ids=token_ids[None], use_cache=False, **inputs).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(1, token_ids[1:, None])[:, 0]
        alone.append(torch.cat([logprobs[:1], logprobs])[targets(it)])
    return alone


def targets(it: Seen) -> Tensor:
    mask = torch.tensor(it.sample.arrays.loss_mask)
    mask[0] = False
    return mask


def adapted_with_images(case: str, targets: list[str] | None = None) -> tuple[float, list[str]]:
    """As `adapted` of the families that read text, with images."""
    policy = image_policy(case)
    add_adapters(policy.model, LoraConfig(rank=2, target_modules=targets), torch.float32)
    model = plain_image_model(case)
    weights = dict(model.named_parameters())
    for name, layer in adapted_layers(policy.model).items():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
        weight = weights[name if name in weights else f"{name}.weight"]
        weight.data = layer.merged(weight.data)
    assert not any(".visual." in name or "vision" in name for name in adapted_layers(policy.model))
    leaves = {name.rpartition(".")[2] for name in adapted_layers(policy.model)}
    with torch.no_grad():
        ours, own = image_logprobs(policy, usual()), own_image_logprobs(model, usual())
    return distance(ours, own), sorted(leaves)


def metered_tower(case: str, *, trains: bool) -> float:
    """Operations of a tower by the meter over those that torch counts, of two images against each
    other. Of the first layer's way back nothing goes to the pixels, which the meter counts too."""
    model, counted = plain_image_model(case), []
    for parameter in tower_parameters(model):
        parameter.requires_grad_(trains)
    flops = ModelFlops.of(model).tower
    assert flops is not None
    found = [seen(80, (5, (8, 12))), seen(80, (5, (16, 16)))]
    for it in found:
        made = drawn_for(model, it.sample.images[0].sha256)
        if "image_position_ids" in made:
            # The meter counts no padding.
            made = {name: value[:, : math.prod(it.grids[0])] for name, value in made.items()}
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trains):
            base: Any = model.base_model
            out = base.get_image_features(**made)
            more = getattr(out, "deepstack_features", None) or []
            total = torch.stack([part.sum() for part in (*out.pooler_output, *more)]).sum()
            if trains:
                total.backward()
        counted.append(counter.get_total_flops())
    ours = [flops.of_images(MicroBatch.join([it.sample])) for it in found]
    numbers = made["pixel_values"].shape[-1]
    first = 2 * numbers * TOWER["hidden_size"] * (16 * 16 - 8 * 12) if trains else 0
    return (ours[1] - ours[0] - first) / (counted[1] - counted[0])

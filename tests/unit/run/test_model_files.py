"""Digests that tell whether two copies of a model write and read the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.run.model_files import merged_patches, most_image_tokens, text_digests

CONFIG: dict[str, Any] = {"vocab_size": 8, "eos_token_id": 3}
SETTINGS = {"eos_token": "<end>", "chat_template": "{{ messages }}"}


def build_folder(folder: Path, **files: Any) -> str:
    folder.mkdir()
    written = {"config.json": CONFIG, "tokenizer_config.json": SETTINGS, "tokenizer.json": {"a": 1}}
    for name, content in {**written, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return str(folder)


@pytest.mark.shows("F44")
@pytest.mark.parametrize(
    ("files", "differing"),
    [
        ({"model.safetensors": "other weights"}, set()),
        ({"tokenizer.json": {"a": 2}}, {"vocabulary"}),
        ({"chat_template.jinja": "{{ tools }}"}, {"chat template"}),
        ({"tokenizer_config.json": {**SETTINGS, "eos_token": "<eos>"}}, {"set of special tokens"}),
        ({"generation_config.json": {"eos_token_id": [3, 4]}}, {"set of special tokens"}),
        ({"config.json": {**CONFIG, "vocab_size": 9}}, {"size of the vocabulary"}),
    ],
)
def test_each_part_of_the_text_has_a_digest_of_its_own(
    tmp_path: Path, files: dict[str, Any], differing: set[str]
) -> None:
    own = text_digests(build_folder(tmp_path / "own"))
    other = text_digests(build_folder(tmp_path / "other", **files))
    assert {part for part in own if own[part] != other[part]} == differing


def test_a_tokenizer_of_another_folder_is_the_one_that_counts(tmp_path: Path) -> None:
    model = build_folder(tmp_path / "model")
    other = build_folder(tmp_path / "other", **{"tokenizer.json": {"a": 2}})
    assert text_digests(model, other)["vocabulary"] == text_digests(other)["vocabulary"]
    assert text_digests("not/here") == {}


QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
SIZE = {"size": {"longest_edge": 4096**2, "shortest_edge": 256**2}}


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"preprocessor_config.json": QWEN | SIZE}, 16_384),
        ({"processor_config.json": {"image_processor": QWEN | SIZE}}, 16_384),
        ({"preprocessor_config.json": {**QWEN, "max_pixels": 28 * 28 * 1280}}, 980),
        ({"preprocessor_config.json": {**QWEN, **SIZE, "max_pixels": 32 * 32}}, 1),
        ({"preprocessor_config.json": {**QWEN, "size": 7}}, None),
        ({"preprocessor_config.json": {**QWEN, **SIZE, "patch_size": 0}}, None),
        ({"preprocessor_config.json": {**QWEN, **SIZE, "image_processor_type": "Other"}}, None),
        ({"processor_config.json": {"image_processor": 3}}, None),
        ({}, None),
        ({"config.json": CONFIG, "preprocessor_config.json": QWEN | SIZE}, None),
    ],
)
def test_a_processor_bounds_what_an_image_takes(
    tmp_path: Path, files: dict[str, Any], most: int | None
) -> None:
    reading = {**CONFIG, "vision_config": {"spatial_merge_size": 2}}
    model = build_folder(tmp_path / "m", **{"config.json": reading, **files})
    assert most_image_tokens(model) == most


@pytest.mark.parametrize("nonsense", [["x"], "2", 1.5, True, 0, -3, None, {}])
def test_a_side_of_patches_that_is_no_whole_number_is_not_read(nonsense: Any) -> None:
    assert merged_patches({"spatial_merge_size": nonsense}) == 2
    assert merged_patches({"spatial_merge_size": nonsense, "pooling_kernel_size": 3}) == 3
    assert merged_patches({"spatial_merge_size": 4}) == 4

"""Digests that tell whether two copies of a model write and read the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.run.model_files import text_digests

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

"""At which tokens a model ends its turn, and where a rendered turn ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.wire.control_tokens import common_prefix, end_of_turn, read_stop_token_ids


def written(folder: Path, **files: Any) -> str:
    """A model directory with these files, their names without `.json`."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("token_ids", "start", "end"),
    [
        ([5, 6, 2, 9], 1, 3),  # <|im_end|> and a newline
        ([5, 6, 2], 1, 3),  # nothing behind the end
        ([5, 6, 2, 3], 1, 3),  # <|im_end|><|endoftext|>: the model stops at the first
        ([5, 2, 6, 2, 9], 1, 4),  # a reply that quotes the token continues behind it
        ([2, 9, 5, 6], 2, 4),  # this turn has no stop token, the one before it had
        ([5, 6], 1, 2),  # a template without stop tokens
        ([5, 2, 9], 1, 2),  # an empty reply
        ([], 0, 0),
    ],
)
def test_a_turn_ends_behind_its_stop_token(token_ids: list[int], start: int, end: int) -> None:
    assert end_of_turn(token_ids, start, frozenset({2, 3})) == end


def test_without_known_stop_tokens_a_turn_is_all_that_was_rendered() -> None:
    assert end_of_turn([5, 6, 2, 9], 1, frozenset()) == 4


def test_every_file_of_a_model_may_name_stop_tokens(tmp_path: Path) -> None:
    model = written(
        tmp_path,
        generation_config={"eos_token_id": [1, 106]},
        config={"eos_token_id": 7, "text_config": {"eos_token_id": 8}},
        tokenizer_config={"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "</s>"}}},
    )
    assert read_stop_token_ids(model) == {1, 106, 7, 8, 9}


def test_the_tokenizers_end_is_found_in_its_own_file_and_folder(tmp_path: Path) -> None:
    model = written(tmp_path / "model", config={"eos_token_id": 7})
    other = written(
        tmp_path / "tokenizer",
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer={"added_tokens": [{"id": 3, "content": "<pad>"}, {"id": 4, "content": "<end>"}]},
    )
    assert read_stop_token_ids(model, other) == {7, 4}


@pytest.mark.parametrize(
    "config", [{}, {"eos_token_id": None}, {"eos_token_id": "2"}, {"eos_token_id": True}, [], "x"]
)
def test_files_that_say_nothing_useful_give_no_stop_token(tmp_path: Path, config: Any) -> None:
    model = written(tmp_path, config=config, tokenizer_config={"eos_token": "<end>"}, tokenizer=3)
    assert read_stop_token_ids(model) == frozenset()


def test_a_model_that_is_not_on_this_machine_has_no_known_stop_tokens(tmp_path: Path) -> None:
    assert read_stop_token_ids("no-such-owner/no-such-model") == frozenset()
    (tmp_path / "config.json").write_text("{")
    assert read_stop_token_ids(str(tmp_path)) == frozenset()


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([], [], 0), ([1], [2], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1), ([1, 2], [1, 3], 1)],
)
def test_the_common_prefix(first: list[int], second: list[int], length: int) -> None:
    assert common_prefix(first, second) == length

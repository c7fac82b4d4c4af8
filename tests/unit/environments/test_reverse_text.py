"""The taskset gradus-reverse-text: its words, its stored texts, its reward."""

from __future__ import annotations

import json
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ConfigError
from gradus_kit.tasksets.similarity import similarity
from gradus_reverse_text.taskset import ReverseTextConfig, ReverseTextTaskset
from gradus_reverse_text.words import WORDS, generate_texts, split_of


def prompts(**config: Any) -> list[str]:
    tasks = ReverseTextTaskset(ReverseTextConfig(id="gradus-reverse-text", **config))
    return [task.data.prompt for task in tasks]


@given(st.integers(), st.integers(1, 3), st.integers(0, 2), st.sampled_from(["train", "holdout"]))
def test_texts_are_lowercase_words_of_the_asked_number(
    seed: int, min_words: int, more: int, split: Any
) -> None:
    texts = generate_texts(
        5, seed=seed, min_words=min_words, max_words=min_words + more, split=split
    )
    assert len(set(texts)) == 5
    for text in texts:
        assert set(text) <= {*string.ascii_lowercase, " "}
        assert min_words <= len(text.split(" ")) <= min_words + more
        assert split_of(text) == split


def test_the_same_seed_gives_the_same_texts_on_every_machine() -> None:
    assert generate_texts(2, seed=0) == ["under wheel old knot", "tea yard fast"]
    assert generate_texts(2, seed=1) != generate_texts(2, seed=0)


def test_a_held_out_text_is_in_no_training_set() -> None:
    train = set(generate_texts(2000, seed=1)) | set(generate_texts(2000, seed=2))
    assert not train & set(generate_texts(500, seed=3, split="holdout"))


def test_more_texts_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="different texts of 1 to 1 words"):
        generate_texts(len(WORDS) + 1, seed=0, min_words=1, max_words=1)
    with pytest.raises(ValueError, match="use 1 <= min_words <= max_words"):
        generate_texts(1, seed=0, min_words=3, max_words=2)


def test_the_words_can_be_imported_without_verifiers() -> None:
    program = "import sys, gradus_reverse_text.words; print('verifiers' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


def test_verifiers_finds_the_taskset_by_its_id() -> None:
    assert vf.taskset_config_type("gradus-reverse-text") is ReverseTextConfig
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        __import__("gradus_reverse_text").Other  # noqa: B018


def test_tasks_carry_the_text_and_its_reverse() -> None:
    config = ReverseTextConfig(id="gradus-reverse-text", num_tasks=3, instruction="Reverse it.")
    tasks = list(ReverseTextTaskset(config))
    assert [task.data.idx for task in tasks] == [0, 1, 2]
    assert tasks[0].data.answer == tasks[0].data.prompt[::-1]
    assert tasks[0].data.system_prompt == "Reverse it."
    assert len(prompts()) == 1000


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_a_file_of_json_lines_is_read_and_split(tmp_path: Path) -> None:
    texts = [f"some text {i}" for i in range(100)]
    path = write_lines(tmp_path / "texts.jsonl", [{"prompt": text} for text in texts])
    train = prompts(source="file", path=path)
    holdout = prompts(source="file", path=path, split="holdout")
    assert sorted([*train, *holdout]) == sorted(texts)
    assert 2 <= len(holdout) <= 25
    assert prompts(source="file", path=path, num_tasks=3) == train[:3]


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": 3}, {"prompt": " "}])
def test_a_row_without_a_text_is_told_with_its_line(tmp_path: Path, row: object) -> None:
    path = write_lines(tmp_path / "texts.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ValueError, match=":2: 'prompt' is"):
        prompts(source="file", path=path)


@pytest.mark.parametrize("row", ["bare", None])
def test_a_row_that_is_no_object_is_told_with_its_line(tmp_path: Path, row: object) -> None:
    path = write_lines(tmp_path / "texts.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ConfigError, match=r":2 is a \w+, not"):
        prompts(source="file", path=path)


def test_a_line_that_is_not_json_is_told_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"texts\.jsonl:2 is not JSON"):
        prompts(source="file", path=path)


def test_a_file_of_another_encoding_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "abc"}\n')
    both = [*prompts(source="file", path=path), *prompts(source="file", path=path, split="holdout")]
    assert both == ["abc"]
    path.write_bytes(b'{"prompt": "\xe4"}\n')
    with pytest.raises(ConfigError, match=r"texts\.jsonl is not UTF-8 .*byte 12"):
        prompts(source="file", path=path)
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        prompts(source="file", path=tmp_path / "none.jsonl")


def test_a_file_source_needs_a_path() -> None:
    with pytest.raises(ValueError, match="needs `path`"):
        prompts(source="file")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("cba", 1.0), ("  cba\n", 1.0), ("", 0.0), ("xyz", 0.0), ("cb", 0.8), ("abc", 1 / 3)],
)
def test_similarity_is_the_share_of_matching_characters(reply: str, expected: float) -> None:
    assert similarity(reply, "cba") == pytest.approx(expected)


@given(st.text(max_size=400))
def test_the_reversed_text_is_always_worth_one(text: str) -> None:
    assert similarity(text, text) == (1.0 if text.strip() else similarity("", ""))


def test_a_reply_that_goes_on_and_on_is_worth_nothing_and_costs_no_time() -> None:
    text = "the quick brown fox " * 75
    started = time.process_time()
    assert similarity("a fox the " * 6000, text) == 0.0
    assert time.process_time() - started < 0.5
    assert similarity("Sure, I can do that. Here it is: cba", "cba") > 0.0


def test_long_texts_are_compared_window_by_window_and_at_once() -> None:
    text = " ".join(f"word{number % 97}" for number in range(500))
    started = time.process_time()
    assert 0.9 < similarity(text.replace("word5 ", "other "), text) < 1.0
    assert similarity("\u5b57" * 2079 + "x", "\u5b57" * 2080) == pytest.approx(2079 / 2080)
    assert similarity("x" * 13_000, text) == 0.0
    assert similarity("word " * 600, text) < 0.8
    assert time.process_time() - started < 5.0

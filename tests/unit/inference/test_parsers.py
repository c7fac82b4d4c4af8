"""Tool calls and reasoning are read by the parser of the model's own format."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from gradus.inference.parsers import (
    BY_MODEL_TYPE,
    BY_TEMPLATE,
    THINK_TAGS,
    Parsers,
    choose_parsers,
    find_parsers,
)


@pytest.mark.parametrize(
    ("model_type", "template", "found"),
    [
        ("qwen3", '<tool_call>{"name": ...} <think>', Parsers("hermes", THINK_TAGS)),
        ("qwen2", "<tool_call>", Parsers("hermes")),
        ("qwen3_moe", "<tool_call> <function=name>", Parsers("qwen3_coder")),
        ("qwen2", "<think>", Parsers(None, THINK_TAGS)),
        ("llama", "<|python_tag|>", Parsers("llama3_json")),
        ("llama", "<tool_call>", Parsers("hermes")),
        ("gpt_oss", "<|channel|>", Parsers("openai", "openai_gptoss")),
        ("llama", "{{ messages }}", Parsers()),
    ],
)
def test_the_format_decides(model_type: str, template: str, found: Parsers) -> None:
    assert choose_parsers(model_type, template) == found


@pytest.mark.parametrize("is_file", [True, False])
def test_a_model_directory_is_read(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    template = "<tool_call> <think>"
    if is_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert find_parsers(str(tmp_path), None) == Parsers("hermes", THINK_TAGS)


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff"])
def test_a_model_that_says_nothing_has_no_parsers(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    assert find_parsers(str(tmp_path), None) == Parsers()


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_every_parser_is_one_of_vllm(kind: str) -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    package = {"tool": "tool_parsers", "reasoning": "reasoning"}[kind]
    registry = (Path(found.origin).parent / package / "__init__.py").read_text()
    known = set(re.findall(r'^    "([^"]+)": \(', registry, re.M))
    used = {getattr(parsers, kind) for parsers in BY_MODEL_TYPE.values()} - {None}
    used |= {parser for _, parser in BY_TEMPLATE} if kind == "tool" else set()
    assert used <= known

"""A reply is reasoning where the prompt or the model opens the tag, and content everywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gradus.inference.compat import ThinkTagsParser
from gradus.testing.tiny_model import build_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def parser_of(tiny_model: Path, *, opens: bool = False, **kwargs: Any) -> ThinkTagsParser:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    if opens:
        tokenizer.chat_template = "{{ messages[0].content }}<|im_start|>assistant\n<think>\n"
    return ThinkTagsParser(tokenizer, **kwargs)


def streamed(parser: ThinkTagsParser, reply: str) -> tuple[str, str]:
    """Reasoning and content of a reply that comes token by token."""
    ids = parser.model_tokenizer.encode(reply)
    reasoning, content, before = "", "", ""
    for at in range(len(ids)):
        text = parser.model_tokenizer.decode(ids[: at + 1])
        delta = parser.extract_reasoning_streaming(
            before, text, text[len(before) :], ids[:at], ids[: at + 1], ids[at : at + 1]
        )
        before = text
        reasoning += (delta.reasoning if delta else None) or ""
        content += (delta.content if delta else None) or ""
    return reasoning, content


@pytest.mark.parametrize(
    ("opens", "reply", "reasoning", "content"),
    [
        (False, "hello", None, "hello"),
        (False, "<think>ab</think>cd", "ab", "cd"),
        (False, "<think>ab", "ab", None),
        (True, "ab", "ab", None),
        (True, "ab</think>cd", "ab", "cd"),
    ],
)
def test_what_is_reasoning(
    tiny_model: Path, opens: bool, reply: str, reasoning: str | None, content: str | None
) -> None:
    parser = parser_of(tiny_model, opens=opens)
    assert parser.extract_reasoning(reply, None) == (reasoning, content)
    assert streamed(parser, reply) == (reasoning or "", content or "")


def test_a_streamed_reply_without_tags_ends_its_reasoning_at_once(tiny_model: Path) -> None:
    """Tool calls are read only where no reasoning is under way."""
    parser = parser_of(tiny_model)
    ids = parser.model_tokenizer.encode("hello")
    assert parser.is_reasoning_end_streaming(ids[:1], ids[:1])
    assert parser.extract_content_ids(ids) == ids
    begun = parser.model_tokenizer.encode("<think>hello")
    assert not parser.is_reasoning_end_streaming(begun, begun[-1:])
    assert not parser_of(tiny_model, opens=True).is_reasoning_end_streaming(ids[:1], ids[:1])


def test_a_tokenizer_without_a_chat_template_opens_nothing(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    assert ThinkTagsParser(tokenizer).extract_reasoning("hello", None) == (None, "hello")

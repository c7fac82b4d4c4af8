"""Replies of the scripted engine for the word lookup: two calls in the first turn, then a word."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from gradus.testing.engine_script import Reply, reply_from_prompt
from gradus.testing.tiny_model import build_tiny_tokenizer

CALL = '<tool_call>\n{"name": "dict_get", "arguments": {"k": "a"}}\n</tool_call>'


@cache
def _encoded() -> tuple[int, int, list[int], list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tiny_tokenizer(Path(folder))
    offer, answer = tokenizer.convert_tokens_to_ids(["<tool_call>", "<tool_response>"])
    calls = tokenizer.encode(f"{CALL}\n{CALL}", add_special_tokens=False)
    return offer, answer, calls, tokenizer.encode("word", add_special_tokens=False)


def reply(prompt_token_ids: list[int]) -> Reply:
    """Two parallel calls where tools are offered, a word after their answers."""
    offer, answer, calls, word = _encoded()
    if answer in prompt_token_ids:
        return Reply(list(word))
    if offer in prompt_token_ids:
        return Reply(list(calls))
    return reply_from_prompt(prompt_token_ids)

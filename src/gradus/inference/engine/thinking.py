"""vLLM's parser of reasoning between `<think>` tags, for models that may also answer at once.

vLLM's own parsers take a reply without tags for reasoning that was cut off, so a model that does
not think would answer with no content. Here a reply begins as reasoning only if the chat template
opens the tag in the prompt, or the model writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

from gradus.inference.parsers import THINK_TAGS


@ReasoningParserManager.register_module(THINK_TAGS)  # type: ignore[arg-type]
class ThinkTagsParser(DeepSeekR1ReasoningParser):
    """Owns how one reply is split into reasoning and content."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        chat = [{"role": "user", "content": "?"}]
        options = kwargs.get("chat_template_kwargs") or {}
        prompt = ""
        with suppress(Exception):  # A template of its own kind, which then opens nothing.
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **options
            )
        self._opens_in_prompt = prompt.rstrip().endswith(self.start_token)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        is_tagged = self.start_token in model_output or self.end_token in model_output
        if not is_tagged and not self._opens_in_prompt:
            return None, model_output
        return super().extract_reasoning(model_output, request)

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> Any:
        if self._opens_in_prompt:
            return super().extract_reasoning_streaming(*args, **kwargs)
        return BaseThinkingReasoningParser.extract_reasoning_streaming(self, *args, **kwargs)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        has_begun = self._opens_in_prompt or self.start_token_id in input_ids
        return not has_begun or super().is_reasoning_end_streaming(input_ids, delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        if self._opens_in_prompt or {self.start_token_id, self.end_token_id} & set(input_ids):
            return super().extract_content_ids(input_ids)
        return list(input_ids)

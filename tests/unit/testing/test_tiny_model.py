"""The tiny model is a real Hugging Face model, and its template writes what the renderer writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers import Qwen3RendererConfig, create_renderer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gradus.testing.tiny_model import (
    CONTROL_TOKENS,
    MARKUP_TOKENS,
    build_tiny_model,
    build_tiny_tokenizer,
)

pytestmark = pytest.mark.torch

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Which words? <b> 'x' & more"}
CALL = {"function": {"name": "look", "arguments": {"word": "one", "deep": [1, None, "<'>"]}}}
CALLS = {"role": "assistant", "content": "Wait", "tool_calls": [CALL, CALL]}
CALLS_WITHOUT_TEXT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "stop", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "content": "two\nthree"}
REASONED = {"role": "assistant", "content": "Done.", "reasoning_content": "Hm, yes"}
REPLY = {"role": "assistant", "content": "Done."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "It's <here>", "parameters": {"type": "object"}},
}

PROMPTS = {
    "user only": [QUESTION],
    "system first": [SYSTEM, QUESTION],
    "content parts": [PARTS],
    "after a reply": [SYSTEM, QUESTION, REPLY, QUESTION],
    "reasoning of an earlier query": [QUESTION, REASONED, QUESTION],
    "tool result": [QUESTION, CALLS, RESULT],
    "two tool results": [SYSTEM, QUESTION, CALLS, RESULT, RESULT],
    "two tool rounds": [QUESTION, CALLS, RESULT, RESULT, CALLS_WITHOUT_TEXT, RESULT],
    "system in the middle": [QUESTION, REPLY, SYSTEM, QUESTION],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=1)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(directory)


def template_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **arguments: Any,
) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False, **arguments
    )


@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", PROMPTS.values(), ids=PROMPTS.keys())
def test_template_writes_what_the_renderer_writes(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[Mapping[str, Any]] | None,
    enable_thinking: bool,
) -> None:
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=enable_thinking))
    rendered = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    expected = template_ids(tokenizer, messages, tools=tools, enable_thinking=enable_thinking)
    assert rendered == expected


def test_final_reasoning_is_written_as_the_renderer_writes_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [QUESTION, REASONED]
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    expected = template_ids(tokenizer, messages, add_generation_prompt=False)
    assert renderer.render_ids(messages) == expected


def test_plain_reply_has_no_think_block_to_learn(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = template_ids(tokenizer, [QUESTION])
    whole = template_ids(tokenizer, [QUESTION, REPLY], add_generation_prompt=False)
    assert tokenizer.decode(whole[len(prompt) :]) == "Done.<|im_end|>\n"
    assert whole[: len(prompt)] == prompt


def test_template_marks_the_tokens_that_the_assistant_writes(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoded = tokenizer.apply_chat_template(
        [QUESTION, CALLS, RESULT, REPLY], return_assistant_tokens_mask=True, return_dict=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    written = tokenizer.decode([token for token, mask in pairs if mask])
    assert written.startswith("Wait\n<tool_call>")
    assert written.endswith("</tool_call><|im_end|>Done.<|im_end|>")


def test_renderer_reads_back_a_plain_reply(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    parsed = renderer.parse_response(tokenizer.encode("one two<|im_end|>"))
    assert (parsed.content, parsed.reasoning_content, parsed.tool_calls) == ("one two", None, [])


def test_renderer_reads_back_a_tool_call_that_it_wrote(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    prompt = renderer.render_ids([QUESTION], add_generation_prompt=True)
    whole = renderer.render_ids([QUESTION, CALLS, RESULT])
    end = whole.index(tokenizer.eos_token_id, len(prompt)) + 1
    parsed = renderer.parse_response(whole[len(prompt) : end], prompt_ids=prompt)
    assert parsed.content == "Wait"
    assert [call.name for call in parsed.tool_calls] == ["look", "look"]
    assert parsed.tool_calls[0].arguments == CALL["function"]["arguments"]


def test_next_turn_extends_the_sampled_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    prompt = renderer.render_ids([QUESTION], add_generation_prompt=True)
    sampled = tokenizer.encode(
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    )
    bridged = renderer.bridge_to_next_turn(prompt, sampled, [RESULT])
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + len(sampled)] == prompt + sampled


def test_every_marker_is_one_token_and_text_survives_the_round_trip(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(tmp_path)
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    text = 'Say:  {"a": [1, 2]}\n\n <tool_call>~</tool_call> '
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_model_loads_with_the_shape_that_was_asked_for(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == "qwen3"
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (64, 1)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [99, 97]


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_seed_alone_decides_the_weights(directory: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = build_tiny_model(tmp_path / "again", hidden_size=64, num_layers=1)
    other = build_tiny_model(tmp_path / "other", hidden_size=64, num_layers=1, seed=1)
    first = read_tensors(directory)
    assert all(torch.equal(first[name], tensor) for name, tensor in read_tensors(again).items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], read_tensors(other)[name])
    assert torch.equal(state, torch.get_rng_state())


def test_tied_embeddings_leave_no_output_matrix_on_disk(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, hidden_size=64, num_layers=1, tie_word_embeddings=True)
    assert "lm_head.weight" not in read_tensors(tmp_path)

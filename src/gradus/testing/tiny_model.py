"""Tiny Qwen3-shaped models, dense or a mixture of experts, with a character tokenizer.

The directory that `build_tiny_model` writes is a complete Hugging Face model: transformers, vLLM
and the `qwen3` renderer load it like a real one. The chat template writes what the `qwen3` renderer
writes, token by token, with one difference: a final reply without reasoning gets no empty think
block, so that a plain reply is nothing but its text and `<|im_end|>`.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
UNKNOWN_TOKEN = "<unk>"
HEAD_SIZE = 32

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}
    {%- for part in content -%}{{ part if part is string else part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set no_thinking = enable_thinking is defined and not enable_thinking -%}
{%- set last = namespace(query=messages | length - 1, found=false) -%}
{%- for message in messages[::-1] -%}
  {%- set text = text_of(message.content) | trim -%}
  {%- set is_response = text.startswith('<tool_response>') and text.endswith('</tool_response>') -%}
  {%- if not last.found and message.role == 'user' and not is_response -%}
    {%- set last.query = messages | length - 1 - loop.index0 -%}
    {%- set last.found = true -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0].role == 'system' -%}{{- text_of(messages[0].content) + '\n\n' -}}{%- endif -%}
  {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
  {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
  {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ' -}}
  {{- '<function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set text = text_of(message.content) -%}
  {%- if message.role == 'user' or message.role == 'system' -%}
    {%- if not (tools and loop.first and message.role == 'system') -%}
      {{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' -}}
    {%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}
    {%- if message.reasoning_content and loop.index0 > last.query -%}
      {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' -}}
      {{- text.lstrip('\n') -}}
    {%- elif no_thinking and not message.reasoning_content -%}
      {{- '<think>\n\n</think>\n\n' + text.lstrip('\n') -}}
    {%- else -%}
      {{- text -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- set arguments = function.arguments -%}
      {{- '\n' if text or not loop.first else '' -}}
      {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- arguments if arguments is string else arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.previtem is undefined or loop.previtem.role != 'tool' else '' -}}
    {{- '\n<tool_response>\n' + text + '\n</tool_response>' -}}
    {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {{- '<think>\n\n</think>\n\n' if no_thinking else '' -}}
{%- endif -%}
""".strip()


def build_tiny_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Write the character tokenizer into `directory` and return it.

    Each printable ASCII character, space and newline is one token, and so is each marker of the
    Qwen3 chat format; any other character becomes the unknown token.
    """
    symbols = [UNKNOWN_TOKEN, "\n", " ", *CHARACTERS]
    tokenizer = Tokenizer(
        BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    # Not special, as in Qwen3: decoding without special tokens must keep tool calls readable.
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN_TOKEN,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)
    let_older_versions_read(directory)
    return fast


def let_older_versions_read(directory: Path) -> None:
    """Say what transformers 5 wrote in the words of 4 too: it knows no `rope_parameters`, no class
    `TokenizersBackend` and no list of `extra_special_tokens`."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if extra := settings.pop("extra_special_tokens", None):
        settings["additional_special_tokens"] = extra
    settings.pop("backend", None)
    path.write_text(json.dumps(settings, indent=2))
    path = directory / "config.json"
    if not path.exists():
        return
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    rope = dict(text["rope_parameters"])
    text["rope_theta"] = rope.pop("rope_theta")
    if rope.get("mrope_section"):
        text["rope_scaling"] = rope
    path.write_text(json.dumps(config, indent=2))


def build_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    hidden_size: int = 192,
    num_layers: int = 4,
    max_length_tokens: int = 2048,
    tie_word_embeddings: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a randomly initialised Qwen3 model with its tokenizer; returns `directory`.

    The defaults give 1.6 million parameters. The global random state does not change.

        >>> build_tiny_model(Path("tiny"), hidden_size=64, num_layers=2)
        PosixPath('tiny')
    """
    tokenizer = build_tiny_tokenizer(directory)
    num_heads = hidden_size // HEAD_SIZE
    stop_ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 3 if num_heads % 3 == 0 else 1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=max_length_tokens,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=stop_ids[0],
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    torch.nn.Module.to(model, dtype=dtype)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id
    )
    # Logs are read line by line; a bar that rewrites its line does not belong there.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    let_older_versions_read(directory)
    return directory

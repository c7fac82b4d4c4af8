"""Which of vLLM's parsers read what a model writes: tool calls and reasoning. Pure but for reading.

The kind of a model decides where that kind has its own format; else the chat template does, because
fine-tuned models keep the kind of their base and bring another template.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from gradus.run.model_files import model_folder

THINK_TAGS = "think_tags"
"""Our own parser, in `compat.py`."""
_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class Parsers:
    """Names in vLLM's registries; None where the model has no format that vLLM knows."""

    tool: str | None = None
    reasoning: str | None = None


BY_MODEL_TYPE: Mapping[str, Parsers] = {
    "deepseek_v32": Parsers("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": Parsers("deepseek_v4", "deepseek_v4"),
    "ernie4_5_moe": Parsers("ernie45", "ernie45"),
    "gemma4": Parsers("gemma4", "gemma4"),
    "glm4_moe": Parsers("glm45", "glm45"),
    "glm4_moe_lite": Parsers("glm47", "glm47"),
    "gpt_oss": Parsers("openai", "openai_gptoss"),
    "granite": Parsers("granite"),
    "granitemoehybrid": Parsers("granite4"),
    "hunyuan_v1_moe": Parsers("hunyuan_a13b", "hunyuan_a13b"),
    "jamba": Parsers("jamba"),
    "kimi_k2": Parsers("kimi_k2", "kimi_k2"),
    "lfm2": Parsers("lfm2"),
    "llama4": Parsers("llama4_pythonic"),
    "minimax_m2": Parsers("minimax_m2", "minimax_m2"),
    "mistral": Parsers("mistral"),
    "mistral3": Parsers("mistral"),
    "olmo3": Parsers("olmo3", "olmo3"),
    "seed_oss": Parsers("seed_oss", "seed_oss"),
    "step3": Parsers("step3", "step3"),
}
"""Kinds of models whose tool calls no other kind writes so."""

BY_TEMPLATE = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
"""What a template shows the model to write → the parser; the first that fits."""


def choose_parsers(model_type: str, template: str) -> Parsers:
    """The parsers for a kind of model with that chat template.

    >>> choose_parsers("qwen3", "... <tool_call> ... <think> ...")
    Parsers(tool='hermes', reasoning='think_tags')
    """
    if model_type in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[model_type]
    tool = next((parser for mark, parser in BY_TEMPLATE if mark in template), None)
    return Parsers(tool, THINK_TAGS if "<think>" in template else None)


def find_parsers(model: str, tokenizer: str | None) -> Parsers:
    """The parsers of a model directory or of a model of the hub; none where it does not say."""
    model_type = _table(model, "config.json").get("model_type")
    if not isinstance(model_type, str):
        return Parsers()
    words = _table(tokenizer or model, "tokenizer_config.json").get("chat_template") or ""
    template = _text(tokenizer or model, _TEMPLATE_FILE) or json.dumps(words)
    return choose_parsers(model_type, template)


def _table(model: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(_text(model, name) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _text(model: str, name: str) -> str | None:
    """The content of one small file of a model; None when there is none.

    The network is asked only for a model that is not on this disk, which the engine fetches too.
    """
    folder = model_folder(model)
    with contextlib.suppress(OSError, UnicodeDecodeError, HfHubHTTPError, ValueError):
        path = folder / name if folder is not None else Path(hf_hub_download(model, name))
        return path.read_text(encoding="utf-8")
    return None

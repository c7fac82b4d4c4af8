"""Tokenizers with the control tokens that each renderer asks for; none can be had offline."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import renderers
from pydantic import TypeAdapter
from renderers import base
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NEEDS_DOWNLOAD = {"gpt-oss"}
"""Its encoder reads a vocabulary from the network."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = ("<|im_start|>", "<|im_end|>")


def made_up_tokenizer(
    control: tuple[str, ...], *, kind: str = "bytes", words: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """One token per byte, or per character with sentencepiece's spaces, and control tokens.

    As in the models that everybody uses, not all control tokens are flagged as special.
    """
    if kind == "bytes":
        names = sorted(pre_tokenizers.ByteLevel.alphabet())
        built = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
    else:
        names = ["▁", "\n", "\uff5c", "\ufffd", *map(chr, range(33, 0x200))]
        names += ["〈", "〉"]
        built = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Split(Regex("."), "isolated")]
        )
        built.decoder = decoders.Metaspace()
    unflagged = [name for name in control if name.strip("</>").replace("_", "").isalpha()]
    built.add_tokens([AddedToken(name, normalized=False) for name in unflagged])
    built.add_tokens([AddedToken(word, normalized=False) for word in words])
    flagged = [name for name in ("<unk_made_up>", *control) if name not in unflagged]
    built.add_special_tokens([AddedToken(name, normalized=False) for name in flagged])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk_made_up>")
    tokenizer.name_or_path = "made-up"
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def renderer_names() -> list[str]:
    """Every renderer that is installed and needs no download."""
    base._populate_registry()
    return sorted(set(base.RENDERER_REGISTRY) - NEEDS_DOWNLOAD)


def settings_of(name: str) -> Any:
    """The settings of a renderer."""
    return TypeAdapter(renderers.RendererConfig).validate_python({"name": name})


@cache
def control_of(name: str) -> tuple[str, ...]:
    """The tokens that a renderer asks its tokenizer for, found by asking until it is content."""
    found: list[str] = list(TURNS)
    while True:
        try:
            base.RENDERER_REGISTRY[name](made_up_tokenizer(tuple(found)), settings_of(name))
        except (AssertionError, ValueError) as error:
            asked = re.search(r"'([^']+)'|\"([^\"]+)\"", str(error))
            missing = asked and (asked[1] or asked[2])
            if not missing or missing in found:
                raise
            found.append(missing)
        else:
            return tuple(found)

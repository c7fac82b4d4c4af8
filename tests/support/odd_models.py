"""Tiny models with honest oddities, written file by file as published ones lie on the hub."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from made_up_tokenizers import TEMPLATE
from safetensors.torch import load_file, save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoConfig, AutoModelForCausalLM

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = (TEXT_END, START, END)
LINES = ("system", "user", "assistant", "hello", "again", "be", "brief", "word")
ROWS = 320
"""Of an embedding, more than any of these vocabularies needs."""

_HEAD = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_REFUSE_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
)
_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% endfor %}"
)
_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}"
)
_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


def _with_special(tokenizer: Tokenizer, special: tuple[str, ...]) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer


def byte_bpe(*special: str) -> Tokenizer:
    """One token per byte, as tiktoken's vocabularies begin."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer, special or CHATML)


def word_level(unknown: str, *special: str) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate((unknown, *LINES))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_special(tokenizer, (unknown, *special))


def characters(unknown: str) -> Tokenizer:
    names = [unknown, "\n", " ", *string.ascii_letters]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.decoder = decoders.Fuse()
    return _with_special(tokenizer, (unknown, *CHATML))


def sentencepiece() -> Tokenizer:
    scores = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    scores += [(f"▁{word}", -3.0) for word in LINES]
    scores += [(letter, -5.0) for letter in string.ascii_letters]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_special(tokenizer, ("<unk>", "<s>", "</s>"))


def word_pieces() -> Tokenizer:
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *LINES, *string.ascii_lowercase]
    names += [f"##{letter}" for letter in string.ascii_lowercase]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return _with_special(tokenizer, ("[UNK]", "[CLS]", "[SEP]", "[PAD]"))


def normalized(normalizer: Any) -> Tokenizer:
    tokenizer = byte_bpe()
    tokenizer.normalizer = normalizer
    return tokenizer


def with_first_token() -> Tokenizer:
    tokenizer = byte_bpe("<s>", *CHATML)
    first = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[first]
    )
    return tokenizer


def with_words() -> Tokenizer:
    tokenizer = byte_bpe()
    tokenizer.add_tokens([AddedToken("hello", normalized=False), AddedToken("  ")])
    return tokenizer


def oversized() -> Tokenizer:
    tokenizer = byte_bpe()
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(ROWS)])
    return tokenizer


PLAIN_TURNS = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TEMPLATES: Mapping[str, Any] = {
    "refuses a system message": _REFUSE_SYSTEM + TEMPLATE,
    "refuses a first question": "{% if messages[0].role != 'system' %}"
    "{{ raise_exception('system first') }}{% endif %}" + TEMPLATE,
    "has no end": PLAIN_TURNS,
    "has a date": "<|im_start|>system\nToday is 26 Jul 2024<|im_end|>\n" + TEMPLATE,
    "asks the clock": "<|im_start|>system\n{{ strftime_now('%d %b %Y %H:%M:%S') }}<|im_end|>\n"
    + TEMPLATE,
    "wants roles in turn": _ALTERNATE + TEMPLATE,
    "trims": TEMPLATE.replace("m.content", "m.content | trim"),
    "lowers roles and has a system of its own": _DEFAULT_SYSTEM
    + TEMPLATE.replace("m.role", "m.role | lower"),
    "marks what is generated": _MARKED + _PROMPT,
    "writes a first token": "{{ bos_token }}" + TEMPLATE,
    "writes JSON": TEMPLATE.replace("m.content", "m.content | tojson"),
    "takes parts of content": TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text }}{% endfor %}{% endif %}",
    ),
    "shouts": TEMPLATE.replace("m.content", "m.content | upper"),
}


def _share_rows(folder: Path) -> None:
    """Files that hold both ends of a model whose config.json ties them."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _add_former_buffers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.layers.7.mtp.weight"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_prefix(folder: Path) -> None:
    """As the files of the first GPT-2 are."""
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): it for name, it in tensors.items()}
    save_file(short, folder / "model.safetensors", metadata={"format": "pt"})


def _sharpen(folder: Path) -> None:
    """Logits of thousands, which float32 rounds to thousandths."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 3e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _named_templates(folder: Path) -> None:
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}]
    _amend(folder / "tokenizer_config.json", chat_template=named)


def _template_file(folder: Path) -> None:
    _amend(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _amend(path: Path, **values: Any) -> None:
    merged = {**json.loads(path.read_bytes()), **values}
    path.write_text(json.dumps({key: it for key, it in merged.items() if it is not None}))


def _generation(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(values))


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: _amend(folder / "config.json", **values)


def _nothing(_: Path) -> None:
    pass


@dataclass(frozen=True)
class Odd:
    """An honest model with one habit of its own.

    >>> Odd("a plain one").template == TEMPLATE
    True
    """

    name: str
    tokenizer: Callable[[], Tokenizer] = byte_bpe
    template: str | None = TEMPLATE
    words: Mapping[str, Any] = field(default_factory=lambda: {"eos_token": END})
    """Of tokenizer_config.json."""
    family: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    """Beside the sizes of a tiny model."""
    dtype: torch.dtype = torch.float32
    shard_size: str = "5GB"
    amend: Callable[[Path], Any] = _nothing
    """Done to the folder at last."""
    max_length_tokens: int = 512
    has_system: bool = False

    def write(self, folder: Path) -> Path:
        """The folder of the model, complete."""
        folder.mkdir(parents=True)
        tokenizer = self.tokenizer()
        sizes = {
            "vocab_size": ROWS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
        }
        end = tokenizer.token_to_id(self.words.get("eos_token") or "")
        given = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None, **self.config}
        config = AutoConfig.for_model(self.family, **{**sizes, **given})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).to(self.dtype)
        model.save_pretrained(folder, max_shard_size=self.shard_size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        words = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self.template,
            **self.words,
        }
        kept = {key: it for key, it in words.items() if it is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(kept))
        self.amend(folder)
        return folder


@cache
def oddities() -> tuple[Odd, ...]:
    """What models on the hub are like."""
    unknown = {"unk_token": TEXT_END, "eos_token": TEXT_END}
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    gpt2 = {"n_positions": 512, "n_embd": 32, "n_layer": 1, "n_head": 2}
    first = {"bos_token": "<s>", "eos_token": END}
    return (
        Odd("an unknown token that ends texts", lambda: word_level(TEXT_END), PLAIN_TURNS, unknown),
        Odd("words with an unknown token of theirs", lambda: word_level("[UNK]", *CHATML)),
        Odd("an unknown token that nobody names", lambda: word_level(TEXT_END), PLAIN_TURNS, {}),
        Odd("characters", lambda: characters("<unk>"), words={"unk_token": "<unk>"}),
        Odd("characters, unknown ones end texts", lambda: characters(TEXT_END), words=unknown),
        Odd(
            "sentencepiece",
            sentencepiece,
            "{{ bos_token }}" + PLAIN_TURNS,
            {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        ),
        Odd("word pieces in lower case", word_pieces, PLAIN_TURNS, {"unk_token": "[UNK]"}),
        Odd("compatible characters", lambda: normalized(normalizers.NFKC())),
        Odd("lower case", lambda: normalized(normalizers.Lowercase())),
        Odd("no ends at all", template=PLAIN_TURNS, words={}),
        Odd("a first token of all texts", with_first_token, words={**first, "add_bos_token": True}),
        Odd("added words", with_words),
        Odd("fewer rows than tokens", oversized),
        Odd("more rows than tokens", config={"vocab_size": 1024}),
        Odd("cleaned spaces", words={"eos_token": END, "clean_up_tokenization_spaces": True}),
        Odd("no longest text", words={"eos_token": END, "model_max_length": int(1e30)}),
        Odd("named templates", amend=_named_templates),
        Odd("a template in a file", amend=_template_file),
        Odd("several ends", amend=_generation(eos_token_id=[258, 256])),
        Odd("several ends in config.json", config={"eos_token_id": [258, 256]}),
        Odd("tied ends", config={"tie_word_embeddings": True}),
        Odd("tied ends, both stored", config={"tie_word_embeddings": True}, amend=_share_rows),
        Odd("tied by its family", family="gemma", amend=_config(tie_word_embeddings=None)),
        Odd("half precision", dtype=torch.float16),
        Odd("bfloat16", dtype=torch.bfloat16),
        Odd("many files", shard_size="20KB"),
        Odd("files of pickle", amend=_as_pickle),
        Odd("large logits", amend=_sharpen),
        Odd("tensors of other versions", amend=_add_former_buffers),
        Odd("names without a prefix", family="gpt2", config=gpt2, amend=_drop_prefix),
        Odd("heads without a size", amend=_config(head_dim=None)),
        Odd("scaled positions", config={"rope_parameters": linear}),
        Odd("few positions", config={"max_position_embeddings": 128}, max_length_tokens=128),
        *(
            Odd(
                f"a template that {name}",
                with_first_token if "first" in name else byte_bpe,
                template,
                first if "first" in name else {"eos_token": END},
                has_system=name == "refuses a first question",
            )
            for name, template in TEMPLATES.items()
        ),
    )

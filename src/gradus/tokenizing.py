"""Loading a tokenizer as its `tokenizer.json` says, without torch.

Some classes of transformers build their own tokenizer around the vocabulary of `tokenizer.json` and
leave out how that file cuts a text: byte-level files whose config names `LlamaTokenizerFast` lose
every space. The weights were trained on what the file says, so the file wins.

torch would cost a process 3 s of CPU and 300 MiB. Since 5.17, `from transformers import
AutoTokenizer` imports it and all of generation, because four modules on its way name what no
tokenizer uses. While a tokenizer is loaded here, those believe that torch is missing; afterwards
they have stand-ins that import it at the first use, so that an environment which loads a model of
transformers later on finds everything.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gradus.log import get_logger
from gradus.run.model_files import json_table, model_folder

VERSION = "5.17.0"
"""Of transformers, whose modules were looked at. Any other imports what it does, only slower."""
_ROOT = "transformers"
_CONFIGS = f"{_ROOT}.configuration_utils"
_FACTORY = f"{_ROOT}.models.auto.auto_factory"
_GENERATION = f"{_ROOT}.generation.configuration_utils"
_PROCESSORS = ("SynthIDTextWatermarkLogitsProcessor", "WatermarkLogitsProcessor")
_NAME_TORCH = (f"{_ROOT}.modeling_rope_utils", f"{_ROOT}.modeling_gguf_pytorch_utils")
_LAZY = (f"{_ROOT}.generation", f"{_ROOT}.integrations")
"""Packages that list what they have as they are imported, and import none of it."""
_FIRST = (_CONFIGS, _FACTORY, _GENERATION, *_NAME_TORCH)
_LOADING = threading.RLock()
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""Reads `tokenizer.json` as it is, in every version of transformers."""
_REPLY = "gradusprobe"
"""A word that no template writes by itself."""
_REPLACED = "gradus_replaced_class"
_IN_ASCII = "gradus_differs_in_ascii"
_PROBE = (
    "Zwölf  +  1234567.89 = 42?\n\n\n\tdef f(x):   return x  # ✓ 数字\r\nI'LL it's  x ... !!\n  "
    "http://a.b/c?d=_e__f_ <b>[1]</b> \u00e9 e\u0301 \u00a0\u3000\u2581 \U0001f469\u200d\U0001f680 "
    'مرحبا नमस्ते สวัสดี ABCdefGHI 10:30, $5 {"k": [1, 2]} '
)
"""Spaces, line ends, digits, cases, scripts, composed and decomposed letters. It begins with a
letter, before which some put a space."""
_PROBED_TOKENS = 400
"""Of the vocabulary, evenly spaced, beside all added ones."""
_log = get_logger(__name__)


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, load: Callable[[str], Any] | None = None
) -> Any:
    """The tokenizer of a folder, or of a name on the hub, whose ids are those of its
    `tokenizer.json`; a warning where the class that it names gives others.

    `load` gives the class's tokenizer, by default `AutoTokenizer`. What lies there without a
    `tokenizer.json` is what transformers makes of it.
    """
    folder = model_folder(name, file=TOKENIZER_JSON)
    with torch_waits():
        try:
            if load is not None:
                given = load(name)
            else:
                auto: Any = importlib.import_module(f"{_ROOT}.models.auto.tokenization_auto")
                given = auto.AutoTokenizer.from_pretrained(
                    name, trust_remote_code=trust_remote_code
                )
        except Exception:  # Classes fail in their own ways at a file that is not theirs.
            if folder is None or not _is_for_a_class(folder):
                raise
            given = None
        folder = folder or model_folder(name, file=TOKENIZER_JSON)
        if folder is None or not (folder / TOKENIZER_JSON).is_file():
            return given
        return _as_the_file_says(given, folder, name)


def _is_for_a_class(folder: Path) -> bool:
    """Whether a class of transformers is to read a `tokenizer.json`, and no code of its own."""
    is_there = (folder / TOKENIZER_JSON).is_file()
    return is_there and "auto_map" not in json_table(folder / TOKENIZER_CONFIG)


def replaced_class(tokenizer: Any) -> str | None:
    """The class whose ids are not those of `tokenizer.json`, so that the file was loaded instead;
    None for every other tokenizer."""
    found: str | None = getattr(tokenizer, _REPLACED, None)
    return found


def misreads_ascii(tokenizer: Any) -> bool:
    """Whether that class differs in plain text already, and not only in how it normalises Unicode:
    then nothing may read the tokenizer by that name."""
    return bool(getattr(tokenizer, _IN_ASCII, False))


def misread(tokenizer: Any) -> str:
    """Tell a person of such a tokenizer; empty for every other."""
    if (kind := replaced_class(tokenizer)) is None:
        return ""
    return (
        f"{tokenizer.name_or_path}: {TOKENIZER_CONFIG} means {kind}, which encodes or decodes a "
        f"text in another way than {TOKENIZER_JSON}; the file is followed everywhere. Set "
        f'tokenizer_class to "{PLAIN_CLASS}" there, so that other libraries do the same'
    )


def learned_text(tokenizer: Any) -> str:
    """A short conversation as the chat template writes it; empty without one, or with one that
    refuses it: rows say why."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:
        return ""


def lacking_row(tokenizer: Any, text: str | Sequence[int], num_rows: Any) -> str:
    """A token of a text that the model has no row for, and what to do; empty where it has
    all of them, or does not say how many."""
    is_text = isinstance(text, str)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if is_text else text
    if not isinstance(num_rows, int) or (lacking := max(ids, default=-1)) < num_rows:
        return ""
    spelled = tokenizer.convert_ids_to_tokens(int(lacking))
    return (
        f"token {lacking} ({spelled!r}), and the model has {num_rows} rows of embeddings: tokens "
        "were added without resize_token_embeddings; resize them, or name the model's own tokenizer"
    )


@dataclass(frozen=True)
class ReplyEnd:
    """The text after a reply in a chat template, and whether generation stops there."""

    new: int | None = None
    """The token that ends it, where nothing stops at it."""
    warning: str = ""
    """For a person; empty where all is well."""


def reply_end(tokenizer: Any, stop_token_ids: Collection[int]) -> ReplyEnd:
    """How a reply ends that a model learns, beside the tokens at which generation stops."""
    _, reply, after = learned_text(tokenizer).rpartition(_REPLY)
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if reply else []
    stops = {*stop_token_ids, tokenizer.eos_token_id} - {None}
    if not reply or stops.intersection(ids):
        return ReplyEnd()
    new = next((number for number in ids if number in tokenizer.added_tokens_decoder), None)
    known = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(stops)))) or "none"
    if new is None:
        return ReplyEnd(
            warning=f"the chat template ends a reply with {after!r}, which is no token of its own: "
            f"no end is learned, and replies run to their limit. The files name {known} as an end"
        )
    written = tokenizer.convert_ids_to_tokens(new)
    return ReplyEnd(
        new,
        f"the chat template ends a reply with {written!r}, and the model's files name {known} as "
        "an end. Both will stand in generation_config.json of what is trained; for the base, add "
        f"{new} to eos_token_id there",
    )


def _as_the_file_says(given: Any, folder: Path, name: str) -> Any:
    """`given` where it says what the file says, else what reads the file as it is."""
    plain_class: Any = getattr(importlib.import_module(_ROOT), PLAIN_CLASS)
    if type(given) is plain_class or not isinstance(given, plain_class | None):
        return given
    plain = plain_class.from_pretrained(str(folder))
    if given is not None and (not _differ(plain, given) or _has_own_prefix(plain, given, folder)):
        return given
    vocabulary = plain.get_vocab()
    for key in plain.SPECIAL_TOKENS_ATTRIBUTES:
        token = getattr(given, key, None)  # Of the class, where the config names none.
        if getattr(plain, key, None) is None and isinstance(token, str) and token in vocabulary:
            setattr(plain, key, token)
    plain.name_or_path = name
    named = json_table(folder / TOKENIZER_CONFIG).get("tokenizer_class")
    setattr(plain, _REPLACED, str(named or type(given).__name__))
    setattr(plain, _IN_ASCII, given is None or _differ(plain, given, is_ascii=True))
    _log.warning("%s", misread(plain))
    return plain


def _has_own_prefix(plain: Any, given: Any, folder: Path) -> bool:
    """Whether all that `given` does otherwise is the space before a text that the config asks for,
    which every version of transformers adds."""
    prefix = json_table(folder / TOKENIZER_CONFIG).get("add_prefix_space")
    cut = plain.backend_tokenizer.pre_tokenizer
    if not isinstance(prefix, bool) or getattr(cut, "add_prefix_space", prefix) == prefix:
        return False
    cut.add_prefix_space = prefix
    is_all = not _differ(plain, given)
    cut.add_prefix_space = not prefix
    return is_all


def _differ(plain: Any, given: Any, *, is_ascii: bool = False) -> bool:
    """Tell whether a text with all that vocabularies are cut by becomes other ids, or is decoded to
    another text."""
    if _parts(plain) == _parts(given):
        return False
    numbers = sorted(plain.get_vocab().values())
    some = numbers[:: len(numbers) // _PROBED_TOKENS + 1]
    text = " ".join([_PROBE, *plain.get_added_vocab(), *(plain.decode([n]) for n in some)])
    if is_ascii:
        text = text.encode("ascii", "ignore").decode()
    ids = plain.encode(text, add_special_tokens=False)
    try:
        if given.encode(text, add_special_tokens=False) != ids:
            return True
    except Exception:  # The Rust side raises this very type, e.g. for a lacking unknown token.
        return True
    texts = {it.decode(ids, clean_up_tokenization_spaces=False) for it in (plain, given)}
    return len(texts) > 1


def _parts(tokenizer: Any) -> list[Any]:
    """What decides ids and decoded text, apart from added tokens, which come from one place."""
    own = tokenizer.backend_tokenizer
    parts = (own.normalizer, own.pre_tokenizer, own.decoder, own.model)
    return [None if part is None else part.__getstate__() for part in parts]


@contextmanager
def torch_waits() -> Iterator[None]:
    """Let this thread load a tokenizer in the block without torch, where that is still to come."""
    with _LOADING:
        if "torch" in sys.modules or importlib.import_module(_ROOT).__version__ != VERSION:
            yield
            return
        if not any(name in sys.modules for name in _FIRST):
            _import_alone()
        configs: Any = importlib.import_module(_CONFIGS)
        if "torch" in sys.modules:
            yield
            return
        # A model's config is read for the name of its tokenizer; its dtype would import torch.
        asked, configs.is_torch_available = configs.is_torch_available, _hidden(configs)
        try:
            yield
        finally:
            configs.is_torch_available = asked


def _hidden(owner: Any) -> Callable[[], bool]:
    """What `owner` says of torch to all threads but this one, which it tells that none is there."""
    here, ask = threading.get_ident(), owner.is_torch_available
    return lambda: threading.get_ident() != here and ask()


def _import_alone() -> None:
    owners: list[Any] = [
        importlib.import_module(f"{_ROOT}.utils{part}") for part in ("", ".import_utils")
    ]
    for name in _LAZY:
        importlib.import_module(name)
    asked = owners[1].is_torch_available
    hidden = _hidden(owners[1])
    for owner in owners:
        owner.is_torch_available = hidden
    try:
        importlib.import_module(f"{_ROOT}.models.auto.tokenization_auto")
    finally:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if value is hidden:
                    setattr(module, name, asked)
        _stand_in()


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == _ROOT and module is not None
    ]


def _stand_in() -> None:
    """Give the four modules what they miss, unless another thread has imported them with torch."""
    for name in _NAME_TORCH:
        vars(importlib.import_module(name)).setdefault("torch", _Torch("torch"))
    for name in _PROCESSORS:
        make = functools.partial(_make, f"{_ROOT}.generation.logits_process", name)
        vars(importlib.import_module(_GENERATION)).setdefault(name, make)
    factory: Any = importlib.import_module(_FACTORY)
    if not hasattr(factory, "GenerationMixin"):
        factory.add_generation_mixin_to_remote_model = functools.partial(
            _add_mixin, factory, factory.add_generation_mixin_to_remote_model
        )


class _Torch(ModuleType):
    """torch, imported at the first look at it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.__name__), name)


def _make(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _add_mixin(factory: ModuleType, add: Callable[[Any], Any], model_class: Any) -> Any:
    """What makes a class of remote code generate; it finds the base in its module's globals."""
    mixin = importlib.import_module(_LAZY[0]).GenerationMixin
    vars(factory).setdefault("GenerationMixin", mixin)
    return add(model_class)

"""Control tokens: a text that spells one stays text, and which of them end a turn.

A tokenizer turns the characters `<|im_end|>` into the one id that ends a turn, wherever they stand.
So a user, a tool, a page or another agent could end its own message and open one of the assistant.
Before a template writes a message, each such spelling in its content gets a mark inside; a
`MarkedTokenizer` encodes what stands before and after a mark apart and drops the mark. The
text reaches the model letter by letter, and what the template itself writes stays as it was.

A mark is a noncharacter, which Unicode keeps out of texts; one in foreign text becomes U+FFFD.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gradus.run.model_files import json_table, model_folder, text_part

MARK = "\ufdd0"
_ESCAPED = "\\ufdd0"
"""A mark after `json.dumps` with ASCII alone."""
_MARKS = re.compile(f"{MARK}|{re.escape(_ESCAPED)}")
_TAG = re.compile(r"<[^\s<>][^<>]*>")
_OWN = re.compile(
    r"</?(?:\w+:)?(?:think|thinking|reasoning|tool_calls?|function|parameter|invoke|arg_key|arg_value)>"
    r"|\[/?THINK\]"
)
"""How an assistant writes its thoughts and calls inside its own message."""
SPELLINGS = re.compile(
    "<\\|[^|<>\\s]{1,40}\\|?>|<[^|<>\\s]{1,40}\\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?tool_response>|</s>"
    r"|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS)\]|\]~b\]|\[e~\["
)
"""What ends or begins turns in the formats of most models, where no tokenizer is at hand."""
_MEDIA = re.compile(r"image|img|video|audio|vision|patch", re.IGNORECASE)
"""Placeholders of a processor, which no template may name."""
_ANCHOR = "\n"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "name", "tool_call_id")


class MarkedText(str):
    """Text whose control tokens carry marks."""

    __slots__ = ()


class ControlTokens:
    """The spellings that structure a conversation for one tokenizer.

    >>> ControlTokens(["<|im_end|>"]).count("a <|im_end|> b")
    1
    """

    def __init__(
        self,
        spellings: Iterable[str],
        *,
        folded: Iterable[str] = (),
        fold: Callable[[str], str] | None = None,
    ) -> None:
        """`folded` are those that a tokenizer finds after `fold`, its normalizer."""
        # A token of one character cannot be cut in two; none that structures text is so short.
        self._spellings = frozenset(s for s in spellings if len(s) > 1 and not s.isspace())
        self._lengths = sorted({len(s) for s in self._spellings}, reverse=True)
        pairs = sorted({s[:2] for s in self._spellings})
        heads = "|".join(
            f"{re.escape(first)}(?=[{''.join(re.escape(pair[1]) for pair in group)}])"
            for first, group in itertools.groupby(pairs, key=lambda pair: pair[0])
        )
        self._heads = re.compile(heads) if heads else None
        self._starts = {s[:n] for s in self._spellings for n in range(1, len(s))}
        self._fold = fold
        self._folded = ControlTokens(map(fold, folded)) if fold is not None else None

    @classmethod
    def of(cls, tokenizer: Any) -> ControlTokens:
        """Added tokens that are flagged as special, or are written like a tag: `<tool_call>`.

        Words that were added to a vocabulary are none, nor are runs of spaces, nor tokens like
        `<item_7>` that no part of the model's format has: template, image, end, or spelling.
        """
        added = [
            token
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if token.special or _TAG.fullmatch(token.content)
        ]
        named = _named(tokenizer)
        if template_texts(tokenizer):
            written = "\n".join([*template_texts(tokenizer), *_written(tokenizer)])
            added = [
                token
                for token in added
                if token.content in named
                or token.content in written
                or any(known.search(token.content) for known in (SPELLINGS, _OWN, _MEDIA))
            ]
        else:
            named = {*named, *map(str, getattr(tokenizer, "all_special_tokens", ()))}
        return cls._folding(tokenizer, added, {token.content for token in added} | named)

    @classmethod
    def of_turns(cls, tokenizer: Any, stop_token_ids: Collection[int]) -> ControlTokens:
        """Those that end a turn or open one, in what a row's author wrote as a reply.

        All others are the author's own choice: `<answer>`, thoughts and calls.
        """
        ends = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in stop_token_ids}
        around = "\n".join(_written(tokenizer))
        spellings = {
            token
            for token in cls.of(tokenizer)._spellings
            if token in ends or (token in around and not _OWN.fullmatch(token))
        }
        spellings |= {*ends, *_named(tokenizer)}
        decoder = getattr(tokenizer, "added_tokens_decoder", {}).values()
        added = [token for token in decoder if token.content in spellings]
        return cls._folding(tokenizer, added, spellings)

    @classmethod
    def _folding(cls, tokenizer: Any, added: Iterable[Any], spellings: set[str]) -> ControlTokens:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalizer = getattr(backend, "normalizer", None)
        if normalizer is None:
            return cls(spellings)
        folded = [token.content for token in added if token.normalized]
        return cls(spellings, folded=folded, fold=normalizer.normalize_str)

    def ids(self, tokenizer: Any) -> dict[int, str]:
        return {tokenizer.convert_tokens_to_ids(s): s for s in self._spellings}

    @property
    def longest(self) -> str | None:
        return max(self._spellings, key=lambda spelling: (len(spelling), spelling), default=None)

    def found(self, text: str) -> list[tuple[int, str]]:
        """Where each spelling begins, those inside one another too."""
        if self._heads is None:
            return []
        return [
            (match.start(), spelling)
            for match in self._heads.finditer(text)
            for length in self._lengths
            if match.start() + length <= len(text)
            and (spelling := text[match.start() : match.start() + length]) in self._spellings
        ]

    def count(self, text: str) -> int:
        return len(self.found(text)) or int(self._is_hidden(text))

    def as_text(self, text: str, *, is_own: bool = False) -> str:
        """The text with a mark in each spelling; an assistant's own tags stay (`is_own`)."""
        if isinstance(text, MarkedText):
            return text
        cleaned = text.replace(MARK, "\ufffd")
        if self._is_hidden(cleaned):
            return MarkedText(MARK.join(cleaned))
        found = self.found(cleaned)
        cuts = {start + 1 for start, token in found if not (is_own and _OWN.fullmatch(token))}
        if _ESCAPED in cleaned:
            cuts.update(place.start() + 1 for place in re.finditer(re.escape(_ESCAPED), cleaned))
        end = len(cleaned.rstrip())
        # The next text of the prompt could complete a spelling that this one begins.
        if any(cleaned[start:end] in self._starts for start in range(max(0, end - 64), end)):
            cuts.add(end)
        if not cuts:
            return cleaned
        edges = [0, *sorted(cuts), len(cleaned)]
        pieces = (cleaned[a:b] for a, b in itertools.pairwise(edges))
        return MarkedText(MARK.join(pieces))

    def plain(self, message: Mapping[str, Any], *, is_sampled: Callable[[str], bool]) -> Any:
        """A message whose texts are text. What the policy sampled itself stays as it was."""
        is_own = message.get("role") == "assistant"

        def read(text: str) -> str:
            is_kept = is_own and not _is_marked(text) and is_sampled(text)
            return text if is_kept else self.as_text(text, is_own=is_own)

        texts = {key: message[key] for key in (*_TEXT_KEYS, "tool_calls") if message.get(key)}
        return {**message, **_mapped(texts, read)}

    def plain_tools(self, tools: Any) -> Any:
        """Declarations of tools whose texts are text."""
        return _mapped(tools, self.as_text)

    def _is_hidden(self, text: str) -> bool:
        """Whether a spelling appears only after the tokenizer's normalizer."""
        if self._fold is None or self._folded is None or not self._folded._spellings:
            return False
        folded = self._fold(text)
        return folded != text and len(self._folded.found(folded)) > len(self.found(text))


def _mapped(value: Any, read: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return read(value)
    if isinstance(value, Mapping):
        return {_mapped(key, read): _mapped(item, read) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, read) for item in value]
    return value


def template_texts(tokenizer: Any) -> list[str]:
    """The source of each chat template that the tokenizer has."""
    found = getattr(tokenizer, "chat_template", None)
    texts = found.values() if isinstance(found, Mapping) else [found]
    return [text for text in texts if isinstance(text, str)]


def _named(tokenizer: Any) -> set[str]:
    """Tokens that the tokenizer has for a purpose: `eos_token`, `pad_token`."""
    names = getattr(tokenizer, "SPECIAL_TOKENS_ATTRIBUTES", ())
    return {str(token) for name in names if (token := getattr(tokenizer, name, None))}


def _written(tokenizer: Any) -> list[str]:
    """What a template writes around words that others say and a plain reply."""
    asked, reply = ({"role": role, "content": "gradus"} for role in ("user", "assistant"))
    talks = [[asked], [asked, reply, asked]]
    talks += [[{"role": "system", "content": "gradus"}, asked]]
    talks += [[asked, reply, {"role": "tool", "content": "gradus"}, reply, asked]]
    found: list[str] = []
    for messages in talks:
        # A template may refuse a role, and raises what it likes.
        with contextlib.suppress(Exception):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            found.append(text)
    return found


class MarkedTokenizer:
    """A tokenizer that encodes what a mark parts as pieces; without marks it does what it did."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: Any, *arguments: Any, **options: Any) -> list[int]:
        if not _is_marked(text):
            return list(self._tokenizer.encode(text, *arguments, **options))
        _check_bare(options)
        token_ids: list[int] = []
        for piece in _MARKS.split(text):
            token_ids += self._piece(piece, is_first=not token_ids)
        return token_ids

    def encode_after(self, text: str) -> list[int]:
        """Ids of a text that goes on behind others, as a model samples them."""
        pieces = _MARKS.split(text)
        return [token_id for piece in pieces for token_id in self._piece(piece, is_first=False)]

    def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
        """The ids of a text, with the place of each when it is asked for."""
        if not _is_marked(text):
            return self._tokenizer(text, *arguments, **options)
        _check_bare(options)
        if not options.pop("return_offsets_mapping", False):
            return {"input_ids": self.encode(text, **options)}
        token_ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        begin = 0
        for edge in [*(match.span() for match in _MARKS.finditer(text)), (len(text), len(text))]:
            piece = text[begin : edge[0]]
            ids, places = self._piece_with_places(piece, is_first=not token_ids)
            token_ids += ids
            offsets += [(start + begin, end + begin) for start, end in places]
            begin = edge[1]
        return {"input_ids": token_ids, "offset_mapping": offsets}

    def apply_chat_template(
        self, conversation: Any, *arguments: Any, tokenize: bool = True, **options: Any
    ) -> Any:
        """The text, or the ids of the text, that the template writes."""
        as_mapping = options.pop("return_dict", True)
        write = self._tokenizer.apply_chat_template
        text = write(conversation, *arguments, tokenize=False, **options)
        if not tokenize:
            return text
        token_ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": token_ids} if as_mapping else token_ids

    def _piece(self, piece: str, *, is_first: bool) -> list[int]:
        if not piece:
            return []
        if is_first or self._is_joinable:
            return list(self._tokenizer.encode(piece, add_special_tokens=False))
        return self._piece_with_places(piece, is_first=False)[0]

    def _piece_with_places(
        self, piece: str, *, is_first: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        if not piece:
            return [], []
        anchor = "" if is_first or self._is_joinable else _ANCHOR
        read = self._tokenizer(
            anchor + piece, add_special_tokens=False, return_offsets_mapping=True
        )
        places = [tuple(place) for place in read["offset_mapping"]]
        own = next((n for n, (_, end) in enumerate(places) if end > len(anchor)), len(places))
        kept = [(max(0, a - len(anchor)), b - len(anchor)) for a, b in places[own:]]
        return list(read["input_ids"])[own:], kept

    @cached_property
    def _is_joinable(self) -> bool:
        """Whether pieces encoded apart say the same; sentencepiece puts a space before each."""
        encode = self._tokenizer.encode
        ids = [*encode("a<", add_special_tokens=False), *encode("|b", add_special_tokens=False)]
        return str(self._tokenizer.decode(ids)).strip() == "a<|b"


def _is_marked(text: Any) -> bool:
    return isinstance(text, str) and (MARK in text or _ESCAPED in text)


def _check_bare(options: Mapping[str, Any]) -> None:
    assert options.get("add_special_tokens") is False, "a template writes its own first token"


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """How many tokens or characters both begin with.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def end_of_turn(token_ids: Sequence[int], start: int, stop_token_ids: Collection[int]) -> int:
    """Where the turn ends that begins at `start`: after the first of its last stop tokens.

    What a template writes after it, such as a newline or a second stop token, no model samples.
    Without a stop token the turn ends with the tokens.

    >>> end_of_turn([5, 6, 2, 9], 1, {2})
    3
    """
    position = len(token_ids) - 1
    while position >= start and token_ids[position] not in stop_token_ids:
        position -= 1
    if position < start:
        return len(token_ids)
    while position > start and token_ids[position - 1] in stop_token_ids:
        position -= 1
    return position + 1


def end_of_content(token_ids: Sequence[int], start: int, stop_token_ids: Collection[int]) -> int:
    """Where the words of that turn end: before the first of its last stop tokens.

    >>> end_of_content([5, 6, 2, 9], 1, {2})
    2
    """
    end = end_of_turn(token_ids, start, stop_token_ids)
    return end - 1 if end > start and token_ids[end - 1] in stop_token_ids else end


def read_stop_token_ids(model: str, tokenizer: str | None = None) -> frozenset[int]:
    """What `generation_config.json`, `config.json` and the tokenizer call the end of a sequence.

    The tokenizer knows one at most, and it may be another: gemma's `<eos>` ends a sequence, its
    `<end_of_turn>` a turn. Empty when the files are not on this machine; the network is never
    asked.
    """
    found: set[int] = set()
    folder = model_folder(model)
    if folder is not None:
        for name in ("generation_config.json", "config.json"):
            found |= _end_ids(json_table(folder / name))
    tokenizer_folder = model_folder(tokenizer or model, file=_TOKENIZER_CONFIG)
    if tokenizer_folder is not None:
        found |= _tokenizer_end(tokenizer_folder)
    return frozenset(found)


def _end_ids(config: dict[str, Any]) -> set[int]:
    """`eos_token_id`, which may be one, several or none, also of a model of text and more."""
    places = (config, text_part(config))
    return {number for place in places for number in _integers(place.get("eos_token_id"))}


def _integers(value: object) -> Iterator[int]:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not isinstance(number, bool):
            yield number


def _tokenizer_end(folder: Path) -> set[int]:
    """The id of the tokenizer's `eos_token`, which its config names as text."""
    config = json_table(folder / _TOKENIZER_CONFIG)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return set()
    added = config.get("added_tokens_decoder")
    for number, entry in added.items() if isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == text and str(number).isdigit():
            return {int(number)}
    tokenizer = json_table(folder / "tokenizer.json")
    entries = tokenizer.get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text:
            return set(_integers(entry.get("id")))
    return set()

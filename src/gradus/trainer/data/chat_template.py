"""A chat template and the forms of a message that it writes; what it would leave out is refused.

Templates ignore keys that they do not know, without a word. So each text of a row is replaced by a
word of its own, once for each shape of rows, and the form of the messages is taken in which the
template writes all words. A text is refused as lost only when changing it changes nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.trainer.data.conversations import Conversation, Message, text_part
from gradus.wire.control_tokens import ControlTokens, template_texts

logger = get_logger(__name__)

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a reply's thoughts; a template reads one of them at most."""
_STRUCTURE = frozenset({"role", "type", "index"})
_LINKS = frozenset({"id", "tool_call_id"})
_SPOKEN = re.compile(r"reason|think|thought|analysis|rationale|content|text|call|function|refusal")
"""In the name of a key: it holds what the model says."""
_SENTENCE = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]+\s+[^\W\d_]{2,}")
_WORD = "gradus{}probe"
_MISWRITTEN = re.compile(
    r"'gradus\d+probe': |(['\"])type\1: \1text\1, \1text\1: ['\"]gradus|\\+\"gradus|\bNone\b"
)
"""A list or an object of Python, JSON inside JSON, parts as JSON, and a content that is none."""
_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True)
class Form:
    """How messages are given to a template; None leaves them as the row has them."""

    arguments: type | None = None
    content: type | None = None
    empty: str | None = ""
    """Content of a message that only calls."""
    thoughts: str | None = None
    """The key of thoughts."""

    @classmethod
    def all_for(cls, messages: Sequence[Message]) -> Iterator[Form]:
        """Those that differ for these messages, the row's own first."""
        has_calls = any(message.get("tool_calls") for message in messages)
        has_thoughts = any(key in message for message in messages for key in THOUGHTS)
        for choice in itertools.product(
            (None, str, list),
            (None, dict, str) if has_calls else (None,),
            ("", None) if has_calls else ("",),
            (None, *THOUGHTS) if has_thoughts else (None,),
        ):
            content, arguments, empty, thoughts = choice
            yield cls(arguments, content, empty, thoughts)

    def write(self, message: Message) -> Message:
        changed = dict(message)
        content, calls = message.get("content"), message.get("tool_calls")
        if not content and "content" in message:
            changed["content"] = self.empty if calls else content
        elif self.content is list and isinstance(content, str):
            changed["content"] = [text_part(content)]
        elif self.content is str and isinstance(content, list) and _is_text(content):
            # As engines join parts for such a template.
            changed["content"] = "\n".join(part["text"] for part in content)
        if calls:
            changed["tool_calls"] = [self._call(call) for call in calls]
        for key in THOUGHTS:
            if self.thoughts is not None and key in changed:
                changed[self.thoughts] = changed.pop(key)
        return changed

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments is dict and isinstance(arguments, str):
            arguments = json.loads(arguments)
        elif self.arguments is str and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}


@dataclass(frozen=True)
class Text:
    """A text of a row, and the word that stands for it."""

    word: str
    key: str
    place: str
    is_needed: bool
    """True if it is learned or shown; what may be metadata is only told."""


@dataclass
class RowProbe:
    """Messages and tools with a word in place of each text, or, with `only`, after that one."""

    parting: re.Pattern[str]
    """Parts a content into texts: what the template itself looks for."""
    only: int | None = None
    texts: list[Text] = field(default_factory=list)
    _links: dict[str, str] = field(default_factory=dict)

    def message(self, number: int, message: Message, checked: Collection[int], last: int) -> Any:
        """The message; only the texts of those `checked` count, and thoughts in the last."""
        is_reply, found = message["role"] == "assistant", {}
        self._place = f"message {number} of role {message['role']!r}"
        self._is_checked = number in checked
        for key, value in message.items():
            if key in _STRUCTURE:
                found[key] = value
            elif key in _LINKS:
                found[key] = self._link(value)
            elif key == "content":
                found[key] = self._content(value)
            elif key == "name" and message["role"] == "tool":
                found[key] = value if self.only is not None else "gradus"
            elif key == "tool_calls":
                found[key] = [self._call(call) for call in value]
            else:
                is_learned = number == last or not is_reply
                is_spoken = key in THOUGHTS or _SPOKEN.search(key) is not None
                is_needed = is_spoken or (is_reply and _SENTENCE.search(str(value)) is not None)
                found[key] = self._any(key, value, is_needed=is_learned and is_needed)
        return found

    def tools(self, tools: Sequence[Any] | None, *, is_checked: bool) -> list[Any] | None:
        """The first tool stands for all: those of a row have one form."""
        if not tools:
            return None
        self._place, self._is_checked = "its tools", is_checked
        schema = tools[0].get("function", tools[0])
        found: dict[str, Any] = {"type": "function"} if self.only is None else dict(tools[0])
        written: dict[str, Any] = {} if self.only is None else dict(schema)
        for key in ("name", "description"):
            if isinstance(schema.get(key), str) and schema[key]:
                written[key] = self._text(f"tools' {key}", schema[key])
        if isinstance(schema.get("parameters"), Mapping) and schema["parameters"].get("properties"):
            given: Mapping[str, Any] = {"type": "object"}
            if self.only is not None:
                given = schema["parameters"]
            name = self._text("tools' parameters", "")
            added = {name: {"type": "string", "description": "of a probe"}} if name else {}
            known = given.get("properties") or {}
            written["parameters"] = {**given, "properties": {**known, **added}}
        first = {**found, "function": written} if "function" in tools[0] else written
        return [first] if self.only is None else [first, *tools[1:]]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._parted("content", content)
        if not isinstance(content, list):
            return content
        shown = {"type": "image", "image": "image"} if self.only is None else None
        return [
            text_part(self._parted("content", part["text"]))
            if part["type"] == "text"
            else shown or part
            for part in content
        ]

    def _parted(self, key: str, text: str) -> str:
        pieces = self.parting.split(text)
        return "".join(
            piece if number % 2 or not piece.strip() else self._text(key, piece)
            for number, piece in enumerate(pieces)
        )

    def _call(self, call: Mapping[str, Any]) -> Any:
        function = call["function"]
        arguments = function["arguments"]
        is_text = isinstance(arguments, str)
        given = json.loads(arguments) if is_text else arguments
        written: Any = given
        if isinstance(given, Mapping) and given:
            name, value = (self._text("tool_calls", "") for _ in range(2))
            added = {name or value: value or name} if name or value else {}
            written = {**(given if self.only is not None else {}), **added}
        if is_text and written is not given:
            written = json.dumps(written)
        changed = {"name": self._text("tool_calls", function["name"]), "arguments": written}
        link = {"id": self._link(call["id"])} if "id" in call else {}
        return {**call, **link, "function": {**function, **changed}}

    def _any(self, key: str, value: Any, *, is_needed: bool) -> Any:
        if isinstance(value, str) and value.strip():
            return self._text(key, value, is_needed=is_needed)
        if isinstance(value, Mapping):
            return {name: self._any(key, part, is_needed=is_needed) for name, part in value.items()}
        if isinstance(value, list):
            return [self._any(key, member, is_needed=is_needed) for member in value]
        return value if self.only is not None else None

    def _text(self, key: str, text: str, *, is_needed: bool = True) -> str:
        number = len(self.texts)
        word = _WORD.format(number)
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        is_only = self._is_checked and number == self.only
        if self._is_checked:
            self.texts.append(Text(word, key, self._place, is_needed))
        else:
            word = "gradus"
        if self.only is not None:
            return text[:end] + word + text[end:] if is_only else text
        return text[:start] + word + text[end:]

    def _link(self, link: Any) -> Any:
        """Another one of the same length, which is the same wherever the row has it again."""
        if self.only is not None or not isinstance(link, str):
            return link
        return self._links.setdefault(link, f"{len(self._links):0{len(link)}d}"[: len(link)])


class ChatTemplate:
    """Writes the messages of a row whole, or refuses the row."""

    def __init__(self, tokenizer: Any, foreign: ControlTokens, own: ControlTokens) -> None:
        """`foreign` stay text in what others say, and of those only `own` in a reply."""
        self._tokenizer = tokenizer
        self._foreign, self._own = foreign, own
        self._found: dict[str, tuple[Form, tuple[int, ...]]] = {}
        self._told: set[str] = set()

    def form_for(self, conversation: Conversation, checked: range) -> Form:
        """The form for the messages up to the last of `checked`; ConfigError for a text of those
        that the template does not write."""
        probe, probed, tools = self._probed(conversation, checked)
        shape = json.dumps([probed, tools, [text.is_needed for text in probe.texts]])
        if shape not in self._found:
            self._found[shape] = self._search(probe.texts, probed, tools)
        form, lost = self._found[shape]
        for number in lost:
            text = probe.texts[number]
            if not text.is_needed:
                self.tell(text.key, "%s: the chat template does not write %r of a message")
            elif self._is_lost(conversation, checked, form, number):
                raise ConfigError(
                    f"{conversation.id}: {text.place}: the chat template does not write "
                    f"{text.key!r}; give it under a key and a role that the template writes, take "
                    "it out, or use a model whose template writes it"
                )
        return form

    def tell(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            logger.warning(message, "a row", key)

    def render(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        form: Form,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """What the template writes, with marks in what is spelled like a control token."""
        try:
            return self._write(
                [self._plain(form.write(message)) for message in messages],
                self._foreign.plain_tools(conversation.tools),
                add_generation_prompt=add_generation_prompt,
            )
        except _ERRORS as error:
            raise ConfigError(
                f"{conversation.id}: the chat template refuses these messages ({error})"
            ) from error

    def _write(self, messages: Any, tools: Any, *, add_generation_prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _plain(self, message: Message) -> Message:
        control = self._own if message["role"] == "assistant" else self._foreign
        plain: Message = control.plain(message, is_sampled=lambda _: False)
        return plain

    def _probed(
        self, conversation: Conversation, checked: range, only: int | None = None
    ) -> tuple[RowProbe, list[Any], list[Any] | None]:
        probe = RowProbe(self._parting, only)
        messages = [
            probe.message(number, message, checked, checked.stop - 1)
            for number, message in enumerate(conversation.messages[: checked.stop])
        ]
        return probe, messages, probe.tools(conversation.tools, is_checked=not checked.start)

    def _search(
        self, texts: Sequence[Text], messages: list[Any], tools: list[Any] | None
    ) -> tuple[Form, tuple[int, ...]]:
        """The first form in which nothing is missing, or the one with least."""
        best: tuple[tuple[bool, int], Form, tuple[int, ...]] | None = None
        for form in Form.all_for(messages):
            try:
                text = self._write([form.write(message) for message in messages], tools)
            except _ERRORS:
                continue
            lost = tuple(n for n, entry in enumerate(texts) if entry.word not in text)
            rank = (bool(_MISWRITTEN.search(text)), sum(texts[n].is_needed for n in lost))
            if best is None or rank < best[0]:
                best = (rank, form, lost)
            if rank == (False, 0):
                break
        return (Form(), ()) if best is None else best[1:]

    def _is_lost(self, conversation: Conversation, checked: range, form: Form, number: int) -> bool:
        """Tell whether the template writes the same when this text is another one."""
        _, changed, tools = self._probed(conversation, checked, only=number)
        given = conversation.messages[: checked.stop]
        try:
            return self._write([form.write(message) for message in changed], tools) == self._write(
                [form.write(message) for message in given], conversation.tools
            )
        except _ERRORS:
            return False

    @cached_property
    def _parting(self) -> re.Pattern[str]:
        """What the template may look for in a content: its strings with signs that are no words."""
        found: set[str] = set()
        for text in template_texts(self._tokenizer):
            for string in re.findall(r"'([^'\n]{3,40})'|\"([^\"\n]{3,40})\"", text):
                literal = "".join(string).replace("\\n", "\n")
                if re.search(r"[<>\[\]|\uff5c\u25c1]", literal):
                    found.update({literal, literal.strip()})
        literals = sorted(found, key=lambda it: (-len(it), it))
        return re.compile(f"({'|'.join(map(re.escape, literals))})" if literals else "(?!)()")


def _is_text(parts: Sequence[Any]) -> bool:
    return all(part["type"] == "text" for part in parts)

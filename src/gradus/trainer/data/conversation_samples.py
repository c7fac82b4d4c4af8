"""From conversations to samples whose learned tokens are exactly those of the chosen messages.

The template needs no generation tags: a message's tokens are those that rendering it adds after
its header. Templates may rewrite earlier turns (Qwen3 removes old reasoning); a turn that does not
continue what was rendered before starts a new sample, so each message is learned once, in
the context in which it would be sampled. What a message spells like a control token stays text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import numpy as np

from gradus.errors import ConfigError
from gradus.trainer.data.conversations import Conversation, Message, PlainText, text_part
from gradus.trainer.data.images import Placeholders
from gradus.wire.control_tokens import ControlTokens, MarkedTokenizer, common_prefix, end_of_turn
from gradus.wire.images import ImageSpan, named_in
from gradus.wire.sample import Sample
from gradus.wire.tokens import TokenArrays
from gradus.wire.versions import VersionSpan

_PROBE = "gradusprobe"
"""A word that no template writes by itself."""
_OWN_KEYS = frozenset({"content", "tool_calls", "reasoning_content"})
"""What of a message is its own text."""


class ConversationEncoder:
    """Turns one conversation into samples with the component ce."""

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Collection[int] = (),
        placeholders: Placeholders | None = None,
        max_image_tokens: int | None = None,
    ) -> None:
        """`stop_token_ids` end a turn, and so does the tokenizer's end token. Without
        `placeholders` a conversation shows no images, of which a sample may have so many."""
        self.max_image_tokens = max_image_tokens
        self._tokenizer = tokenizer
        self._placeholders = placeholders
        self._control = ControlTokens.of(tokenizer)
        self._reader = MarkedTokenizer(tokenizer)
        self._stops = {*stop_token_ids, tokenizer.eos_token_id} - {None}
        self._begin = _begin_of_text(tokenizer)
        self._shown: dict[tuple[str, bool], bool] = {}

    def encode(self, conversation: Conversation | PlainText) -> list[Sample]:
        """The samples of a conversation; none when it holds nothing to learn."""
        if isinstance(conversation, PlainText):
            return [self._encode_text(conversation)]
        branches: list[_Branch] = []
        for number in conversation.learned:
            token_ids, start = self._message_span(conversation, number)
            end = end_of_turn(token_ids, start, self._stops)
            images = self._images(conversation, number, token_ids)
            around = None if self._placeholders is None else self._placeholders.around
            token_ids, (start, end) = _with_placeholders(token_ids, images, (start, end), around)
            if not branches or not branches[-1].is_continued_by(token_ids):
                branches.append(_Branch())
            branches[-1].extend(token_ids, start, end, images)
        return [
            branch.sample(f"{conversation.id}/{number}") for number, branch in enumerate(branches)
        ]

    def _encode_text(self, text: PlainText) -> Sample:
        # Without a template, the row itself is what writes control tokens.
        prompt = self._tokens(text.id, text.prompt, self._tokenizer)
        token_ids = self._tokens(text.id, text.prompt + text.completion, self._tokenizer)
        if prompt[: len(self._begin)] != self._begin:
            prompt, token_ids = self._begin + prompt, self._begin + token_ids
        if self._tokenizer.eos_token_id is not None:
            token_ids = [*token_ids, self._tokenizer.eos_token_id]
        branch = _Branch()
        branch.extend(token_ids, common_prefix(prompt, token_ids), len(token_ids))
        return branch.sample(f"{text.id}/0")

    def _message_span(self, conversation: Conversation, number: int) -> tuple[list[int], int]:
        """Tokens up to and with message `number`, and where its own tokens begin."""
        whole = self._render(conversation, conversation.messages[: number + 1])
        token_ids = self._tokens(conversation.id, whole, self._reader)
        header = whole[: self._header_length(conversation, number, whole)]
        return token_ids, common_prefix(
            self._tokens(conversation.id, header, self._reader), token_ids
        )

    def _images(
        self, conversation: Conversation, number: int, token_ids: Sequence[int]
    ) -> list[ImageSpan]:
        """Of the messages up to `number`: where each lies once its placeholders are there."""
        contents = [message.get("content") for message in conversation.messages[: number + 1]]
        shown = [
            sha256
            for content in contents
            for part in (content if isinstance(content, list) else ())
            if part["type"] == "image" and (sha256 := named_in(part["image"])) is not None
        ]
        if not shown or self._placeholders is None:
            return []
        places = [n for n, it in enumerate(token_ids) if it == self._placeholders.token_id]
        if len(places) != len(shown):
            raise ConfigError(
                f"{conversation.id}: {len(shown)} images are shown up to message {number}, and the "
                f"chat template writes a token for {len(places)}; use a model whose template "
                "writes images in such messages"
            )
        spans, added, around = [], 0, self._placeholders.around or ()
        for place, sha256 in zip(places, shown, strict=True):
            start = place + added + bool(around)
            spans.append(ImageSpan(sha256, start, self._placeholders.count(sha256)))
            added += spans[-1].length + len(around) - 1
        return spans

    def _header_length(self, conversation: Conversation, number: int, whole: str) -> int:
        """Characters of `whole` before what message `number` itself adds."""
        message = conversation.messages[number]
        before = conversation.messages[:number]
        if message["role"] != "assistant" or not before:
            # No prompt asks for this role.
            return self._in_common_with_another(conversation, number, whole)
        prompt = self._render(conversation, before, add_generation_prompt=True)
        if whole.startswith(prompt):
            return len(prompt)
        plain = self._render(conversation, before)
        if whole.startswith(plain):
            return common_prefix(prompt, whole)
        # The template writes the message before in another way once it is not the last (Qwen3):
        # only the header itself can be looked up.
        limit = self._in_common_with_another(conversation, number, whole)
        header = prompt[len(plain) :] if prompt.startswith(plain) else ""
        begin = whole.rfind(header, 0, limit) if header else -1
        return limit if begin < 0 else begin + len(header)

    def _in_common_with_another(self, conversation: Conversation, number: int, whole: str) -> int:
        """Characters that `whole` shares with the same messages but another content at the end."""
        message = conversation.messages[number]
        text = "b" if _text_of(message.get("content")).lstrip().startswith("a") else "a"
        other = {key: value for key, value in message.items() if key not in _OWN_KEYS}
        messages = [*conversation.messages[:number], {**other, "content": text}]
        return common_prefix(self._render(conversation, messages), whole)

    def _render(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._as_expected(message) for message in messages],
                tools=self._control.plain_tools(conversation.tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{conversation.id}: the chat template refuses these messages ({error})"
            ) from error
        return text

    def _as_expected(self, message: Message) -> Message:
        """The message with its content, and the arguments of its calls, in the form that the
        template writes; in another form it would silently leave the text out."""
        changed = dict(message)
        content, role = message.get("content"), message["role"]
        has_images = isinstance(content, list) and any(it["type"] == "image" for it in content)
        if has_images:
            pass  # what the template leaves out of them is found by the tokens
        elif isinstance(content, list) and not self._shows(role, as_parts=True):
            # As engines join parts for such a template.
            changed["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and not self._shows(role, as_parts=False):
            is_shown = self._shows(role, as_parts=True)
            changed["content"] = [text_part(content)] if is_shown else content
        if message.get("tool_calls") and self._writes_arguments:
            changed["tool_calls"] = [_with_objects(call) for call in message["tool_calls"]]
        plain: Message = self._control.plain(changed, is_sampled=lambda _: False)
        return plain

    def _shows(self, role: str, *, as_parts: bool) -> bool:
        """Whether the template writes the content of a role when it is given as parts, or as a
        string."""
        if (role, as_parts) in self._shown:
            return self._shown[role, as_parts]

        def message(role: str, text: str) -> Message:
            return {"role": role, "content": [text_part(text)] if as_parts else text}

        user, asked = message("user", "a"), message(role, _PROBE)
        messages = {"user": [asked], "system": [asked, user]}.get(role, [user, asked])
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, ValueError, TypeError):
            text = ""
        self._shown[role, as_parts] = _PROBE in text
        return self._shown[role, as_parts]

    @cached_property
    def _writes_arguments(self) -> bool:
        """Whether the template writes arguments as JSON itself; it would escape those that are
        JSON already, as engines and episode records give them."""
        function = {"name": "add", "arguments": '{"key": 1}'}
        call = {"id": "call00000", "type": "function", "function": function}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "add"}, reply], tokenize=False
            )
        except (jinja2.TemplateError, ValueError, TypeError):
            return True
        return '\\"key\\"' in text

    def _tokens(self, place: str, text: str, tokenizer: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{place}: the text is not Unicode ({error.reason}); repair or delete the row"
            ) from error
        token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


class _Branch:
    """Tokens rendered so far, and which of them are learned."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._is_learned: list[bool] = []
        self._images: list[ImageSpan] = []

    def is_continued_by(self, token_ids: Sequence[int]) -> bool:
        return list(token_ids[: len(self._token_ids)]) == self._token_ids

    def extend(
        self, token_ids: Sequence[int], start: int, end: int, images: Sequence[ImageSpan] = ()
    ) -> None:
        """Grow to `token_ids`, which hold `images`, and of which [start, end) are learned."""
        self._images = list(images)
        added = range(len(self._token_ids), len(token_ids))
        self._is_learned += [start <= position < end for position in added]
        self._token_ids = list(token_ids)

    def sample(self, id: str) -> Sample:
        """The sample, cut after its last learned token."""
        learned = np.array(self._is_learned, np.bool_)
        for span in self._images:
            learned[span.start : span.end] = False
        length = int(np.flatnonzero(learned)[-1]) + 1 if learned.any() else len(learned)
        learned = learned[:length]
        return Sample(
            id=id,
            environment="sft",
            group_id=id,
            episode_id=id,
            reward=0.0,
            versions=VersionSpan(oldest=0, newest=0),
            arrays=TokenArrays.build(
                np.array(self._token_ids[:length]), {"ce": learned.astype(np.float32)}
            ),
            images=[span for span in self._images if span.end <= length],
        )


def _with_placeholders(
    token_ids: Sequence[int],
    images: Sequence[ImageSpan],
    ends: tuple[int, int],
    around: tuple[int, int] | None,
) -> tuple[list[int], tuple[int, int]]:
    """With as many placeholders as each image has, and the tokens `around` them, where one stood;
    and where `ends` are then."""
    found = list(token_ids)
    first, last = ends
    before, after = ([around[0]], [around[1]]) if around else ([], [])
    for span in images:
        place = span.start - len(before)
        written = [*before, *[found[place]] * span.length, *after]
        found[place : place + 1] = written
        first += (len(written) - 1) * (place < first)
        last += (len(written) - 1) * (place < last)
    return found, (first, last)


def _begin_of_text(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before bare text, as engines do; templates write it."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("")["input_ids"][:1] == [begin] else []


def _text_of(content: Any) -> str:
    """Content as one string, whatever its form."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _with_objects(call: Any) -> Any:
    """A call with its arguments parsed; unchanged when they are not JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = {**function, "arguments": json.loads(function["arguments"])}
    except ValueError:
        return call
    return {**call, "function": parsed} if "function" in call else parsed

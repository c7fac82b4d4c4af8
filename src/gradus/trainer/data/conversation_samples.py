"""From conversations to samples whose learned tokens are exactly those of the chosen messages.

The template needs no generation tags: a message's tokens are those that rendering it adds after
its header. Templates may rewrite earlier turns (Qwen3 removes old reasoning); a turn that does not
continue what was rendered before starts a new sample, so each message is learned once, in
the context in which it would be sampled. What a message spells like a control token stays text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from gradus.errors import ConfigError
from gradus.tokenizing import lacking_row
from gradus.trainer.data.chat_template import THOUGHTS, ChatTemplate, Form
from gradus.trainer.data.conversations import Conversation, Message, PlainText, text_part
from gradus.trainer.data.images import Placeholders
from gradus.wire.control_tokens import ControlTokens, MarkedTokenizer, common_prefix, end_of_turn
from gradus.wire.images import ImageSpan, named_in
from gradus.wire.sample import Sample
from gradus.wire.tokens import TokenArrays
from gradus.wire.versions import VersionSpan


class ConversationEncoder:
    """Turns one conversation into samples with the component ce."""

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Collection[int] = (),
        placeholders: Placeholders | None = None,
        max_image_tokens: int | None = None,
        num_rows: int | None = None,
    ) -> None:
        """`stop_token_ids` end a turn, and so does the tokenizer's end token. Without
        `placeholders` a conversation shows no images, of which a sample may have so many. The
        model knows `num_rows` tokens, None for any number."""
        self.max_image_tokens = max_image_tokens
        self._num_rows = num_rows
        self._tokenizer = tokenizer
        self._placeholders = placeholders
        self._reader = MarkedTokenizer(tokenizer)
        self._stops = {*stop_token_ids, tokenizer.eos_token_id} - {None}
        self._begin = _begin_of_text(tokenizer)
        foreign = ControlTokens.of(tokenizer)
        own = ControlTokens.of_turns(tokenizer, self._stops)
        self._template = ChatTemplate(tokenizer, foreign, own)

    def encode(self, conversation: Conversation | PlainText) -> list[Sample]:
        """The samples of a conversation; none when it holds nothing to learn."""
        if isinstance(conversation, PlainText):
            return [self._encode_text(conversation)]
        branches: list[_Branch] = []
        num_checked = 0
        for number in conversation.learned:
            form = self._template.form_for(conversation, range(num_checked, number + 1))
            num_checked = number + 1
            token_ids, start = self._message_span(conversation, number, form)
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
        self._check_unicode(text.id, text.prompt + text.completion)
        prompt = list(self._tokenizer.encode(text.prompt, add_special_tokens=False))
        if prompt[: len(self._begin)] != self._begin:
            prompt = self._begin + prompt
        token_ids = self._check_rows(text.id, prompt + self._reader.encode_after(text.completion))
        if self._tokenizer.eos_token_id is not None:
            token_ids = [*token_ids, self._tokenizer.eos_token_id]
        branch = _Branch()
        branch.extend(token_ids, len(prompt), len(token_ids))
        return branch.sample(f"{text.id}/0")

    def _message_span(
        self, conversation: Conversation, number: int, form: Form
    ) -> tuple[list[int], int]:
        """Tokens of a prompt for message `number` and of the message, and where its own begin.

        A reply is sampled token by token behind the prompt: the two are never encoded together.
        """
        prompt, whole, start = self._own_start(conversation, number, form)
        self._check_unicode(conversation.id, whole)
        context = self._reader.encode(prompt, add_special_tokens=False)
        token_ids = context + self._reader.encode_after(whole[start:])
        return self._check_rows(conversation.id, token_ids), len(context)

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

    def _own_start(
        self, conversation: Conversation, number: int, form: Form
    ) -> tuple[str, str, int]:
        """The text before what message `number` itself adds, as a prompt would be; all that the
        template writes with the message; and where in that its own text begins."""
        messages = conversation.messages
        before = messages[:number]

        def render(shown: Sequence[Message], *, asks: bool = False) -> str:
            return self._template.render(conversation, shown, form, add_generation_prompt=asks)

        whole = render(messages[: number + 1])
        if messages[number]["role"] == "assistant" and before:
            prompt = render(before, asks=True)
            if whole.startswith(prompt):
                return prompt, whole, len(prompt)
            limit = common_prefix(render([*before, _another(messages[number])]), whole)
            plain = render(before)
            if whole.startswith(plain):
                start = min(common_prefix(prompt, whole), limit)
                if prompt[start:].strip():
                    self._template.tell(
                        prompt[start:], "%s: a prompt ends with %r, and a reply does not begin so"
                    )
                return prompt, whole, start
            # The template writes the message before in another way once it is not the last
            # (Qwen3): only the header itself can be looked up.
            header = prompt[len(plain) :] if prompt.startswith(plain) else ""
            begin = whole.rfind(header, 0, limit) if header else -1
            if begin >= 0:
                return prompt, whole, begin + len(header)
        else:
            # No prompt asks for this role.
            limit = common_prefix(render([*before, _another(messages[number])]), whole)
        return whole[:limit], whole, limit

    def _check_unicode(self, place: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{place}: the text is not Unicode ({error.reason}); repair or delete the row"
            ) from error

    def _check_rows(self, place: str, token_ids: list[int]) -> list[int]:
        """The same ids; ConfigError for one that the model has no row for."""
        if refusal := lacking_row(self._tokenizer, token_ids, self._num_rows):
            raise ConfigError(f"{place}: its text holds {refusal}")
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


def _another(message: Message) -> Message:
    """A message that its role says in place of this one, with another first letter."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    own = {"content", "tool_calls", *THOUGHTS}
    other = {key: value for key, value in message.items() if key not in own}
    text = "b" if (content or "").lstrip().startswith("a") else "a"
    is_parts = isinstance(message.get("content"), list)
    return {**other, "content": [text_part(text)] if is_parts else text}

"""Every renderer of this process writes the content of messages as text, never as control tokens.

It relies only on what all renderers share: they are given a tokenizer, and messages enter through
`render`, `render_ids` and `bridge_to_next_turn`. So it works for all of them, in any version.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import renderers
from renderers import base

from gradus.errors import ConfigError, first_line
from gradus.log import get_logger
from gradus.wire.control_tokens import MARK, ControlTokens, MarkedTokenizer

log = get_logger(__name__)

REMEMBERED_REPLIES = 65_536
"""Sampled replies with control tokens inside, which are rare; the oldest is forgotten first."""


def keep_content_plain() -> None:
    """Build every renderer from now on with `plain_renderer`."""
    build = base.create_renderer
    if hasattr(build, "__wrapped__"):
        return
    replies = SampledReplies()

    @functools.wraps(build)
    def create_plain(tokenizer: Any, config: Any = None, **options: Any) -> Any:
        return plain_renderer(build, tokenizer, config, replies=replies, **options)

    base.create_renderer = renderers.create_renderer = create_plain


class SampledReplies:
    """Remembers replies in which the policy sampled control tokens itself.

    A renderer that cannot extend a conversation renders all of it again from text; what was sampled
    as one token must become that token again.
    """

    def __init__(self, *, remembered: int = REMEMBERED_REPLIES) -> None:
        self._remembered = remembered
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def add(self, control: ControlTokens, parsed: Any, sampled: Counter[str]) -> None:
        """Remember the texts of a reply whose control tokens were all sampled as such."""
        for text in (parsed.content, parsed.reasoning_content):
            found = Counter(token for _, token in control.found(text or ""))
            if found and found <= sampled:
                self._hashes[hash(text)] = None
        while len(self._hashes) > self._remembered:
            self._hashes.popitem(last=False)

    def __contains__(self, text: str) -> bool:
        return hash(text) in self._hashes


def plain_renderer(
    build: Callable[..., Any],
    tokenizer: Any,
    config: Any = None,
    *,
    replies: SampledReplies | None = None,
    **options: Any,
) -> Any:
    """The renderer that `build` makes, with content that stays text."""
    control = ControlTokens.of(tokenizer)
    names = control.ids(tokenizer)
    known = SampledReplies() if replies is None else replies
    renderer = build(MarkedTokenizer(tokenizer), config, **options)
    write, write_ids = renderer.render, renderer.render_ids
    extend, parse = renderer.bridge_to_next_turn, renderer.parse_response

    if _reads_marks(tokenizer, control, write_ids):
        tools_as_text = control.plain_tools
    else:
        control, tools_as_text = ControlTokens(()), _unchanged

    def plain(messages: Sequence[Any]) -> list[Any]:
        return [control.plain(message, is_sampled=known.__contains__) for message in messages]

    @functools.wraps(write)
    def render(messages: Sequence[Any], *, tools: Any = None, **more: Any) -> Any:
        return write(plain(messages), tools=tools_as_text(tools), **more)

    @functools.wraps(write_ids)
    def render_ids(messages: Sequence[Any], *, tools: Any = None, **more: Any) -> Any:
        return write_ids(plain(messages), tools=tools_as_text(tools), **more)

    @functools.wraps(extend)
    def bridge_to_next_turn(
        prompt_ids: list[int], reply_ids: list[int], new_messages: Sequence[Any], **more: Any
    ) -> Any:
        tools = tools_as_text(more.pop("tools", None))
        return extend(prompt_ids, reply_ids, plain(new_messages), tools=tools, **more)

    @functools.wraps(parse)
    def parse_response(token_ids: list[int], **more: Any) -> Any:
        parsed = parse(token_ids, **more)
        sampled = Counter(names[token_id] for token_id in token_ids if token_id in names)
        if sampled:
            known.add(control, parsed, sampled)
        return parsed

    renderer.render, renderer.render_ids = render, render_ids
    renderer.bridge_to_next_turn, renderer.parse_response = bridge_to_next_turn, parse_response
    return renderer


def _reads_marks(
    tokenizer: Any, control: ControlTokens, write_ids: Callable[..., Sequence[int]]
) -> bool:
    """Whether a renderer needs marks: one with an encoder of its own may keep content plain itself.

    ConfigError for a renderer that turns content into control tokens in spite of the marks: an id
    that no character by itself has, as the unknown token has that of all that a vocabulary lacks.
    What no conversation shows is left to the marks, which harm no text.
    """
    spelling = control.longest
    if spelling is None:
        return False
    plain = f"word {spelling} word"
    of_characters = {
        token_id
        for character in {*plain}
        for token_id in tokenizer.encode(character, add_special_tokens=False)
    }
    structural = control.ids(tokenizer).keys() - of_characters

    def structure(text: str) -> tuple[list[int], str]:
        ids = _written(write_ids, text)
        return [token_id for token_id in ids if token_id in structural], tokenizer.decode(ids)

    try:
        (expected, _), (found, text) = structure("word"), structure(control.as_text(plain))
        if found == expected and MARK not in text:
            return True
        if structure(plain)[0] == expected:
            return False
    except Exception as error:  # A template may refuse any conversation, and so may a renderer.
        log.warning("a message that spells %r could not be tried: %s", spelling, first_line(error))
        return True
    raise ConfigError(
        f"model.renderer turns the text {spelling!r} of a message into a control token, so a "
        "tool or another agent could write turns of the policy; encode content with the tokenizer "
        "that the renderer was given"
    )


def _written(write_ids: Callable[..., Sequence[int]], text: str) -> list[int]:
    """A question with this text, after a system message where a template wants one first."""
    question = {"role": "user", "content": text}
    try:
        return list(write_ids([question]))
    except Exception:
        return list(write_ids([{"role": "system", "content": "word"}, question]))


def _unchanged(tools: Any) -> Any:
    return tools

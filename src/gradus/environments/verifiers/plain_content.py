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

from gradus.errors import ConfigError
from gradus.wire.control_tokens import MARK, ControlTokens, MarkedTokenizer

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

    def ids_of(text: str) -> list[int]:
        return list(write_ids([{"role": "user", "content": text}]))

    if _reads_marks(tokenizer, control, ids_of):
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
    tokenizer: Any, control: ControlTokens, ids_of: Callable[[str], list[int]]
) -> bool:
    """Whether a renderer needs marks: one with an encoder of its own may keep content plain itself.

    ConfigError for a renderer that turns content into control tokens in spite of the marks.
    """
    spelling = control.longest
    if spelling is None:
        return False
    control_ids = control.ids(tokenizer)

    def structure(text: str) -> list[int]:
        return [token_id for token_id in ids_of(text) if token_id in control_ids]

    expected = structure("word")
    marked = control.as_text(f"word {spelling} word")
    if structure(marked) == expected and MARK not in tokenizer.decode(ids_of(marked)):
        return True
    if structure(f"word {spelling} word") == expected:
        return False
    raise ConfigError(
        f"model.renderer turns the text {spelling!r} of a message into a control token, so a "
        "tool or another agent could write turns of the policy; encode content with the tokenizer "
        "that the renderer was given"
    )


def _unchanged(tools: Any) -> Any:
    return tools

"""Text of a reply before its last token: what no later token can take back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from renderers.default import DefaultRenderer

from gradus.log import get_logger

HEADER = "X-Gradus-Live"
"""Of a model call: who listens to its reply, in this process."""
_CALL_MARKS = "{[<`"
"""What begins a tool call where its form is text."""
_SHARE = 32
"""A reply is read anew once it grew by one part in so many: the cost stays linear in its length."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class ReplyStart:
    """How a reply begins."""

    reasoning: str = ""
    content: str = ""

    def is_begun_by(self, before: ReplyStart) -> bool:
        """Whether this goes on from what was said before; reasoning ends where content begins."""
        if before.content and before.reasoning != self.reasoning:
            return False
        return self.reasoning.startswith(before.reasoning) and self.content.startswith(
            before.content
        )


Tell = Callable[[ReplyStart | None], None]
"""Told how a reply begins, each time that more is sure; None where it begins again."""


class Listeners:
    """Those who read replies while they grow: a model call names its listener in a header."""

    _tells: ClassVar[dict[str, Tell]] = {}
    """On the class, because the call crosses a socket of this process in between."""

    @classmethod
    @contextmanager
    def added(cls, tell: Tell) -> Iterator[dict[str, str]]:
        """The header of a call whose reply is told, until the end of the block."""
        name = secrets.token_hex(16)
        cls._tells[name] = tell
        try:
            yield {HEADER: name}
        finally:
            del cls._tells[name]

    @classmethod
    def of(cls, headers: Mapping[str, str] | None) -> Tell | None:
        """Who listens to the reply to these headers."""
        named = {name.lower(): value for name, value in (headers or {}).items()}
        return cls._tells.get(named.get(HEADER.lower(), ""))


class LiveReply:
    """Reads the tokens of one reply as its renderer does, and tells what is sure of its text.

    Held back are the last spaces, characters that are not whole, what may begin a stop string, and
    what may begin a tool call that the renderer knows by its text. The reply itself does not pass
    here: what is recorded is what the engine answers at its end.
    """

    def __init__(self, renderer: Any, tell: Tell, *, stops: Sequence[str] = ()) -> None:
        self._renderer = renderer
        self._tell = tell
        self._stops = stops
        # The default renderer keeps all spaces, the others none at the ends.
        is_plain = isinstance(renderer, DefaultRenderer)
        self._strip = str.rstrip if is_plain else str.strip
        has_calls = renderer.supports_tools if is_plain else not _has_call_tokens(renderer)
        self._marks = _CALL_MARKS if has_calls else ""
        self._said = ReplyStart()
        self._next = 1

    def begin(self) -> None:
        """The engine is asked, perhaps again: what was told before stays, for it was read."""
        if self._said != ReplyStart():
            self._tell(None)

    def hear(self, prompt: list[int], tokens: list[int]) -> None:
        """Tell what these tokens add."""
        if len(tokens) < self._next:
            return
        self._next = len(tokens) + max(1, len(tokens) // _SHARE)
        try:
            read = self._renderer.parse_response(tokens, prompt_ids=prompt)
        except Exception as error:  # whatever half a reply makes a parser stumble over
            logger.debug("a reply cannot be read yet: %r", error)
            return
        content = self._sure(read.content or "")
        reasoning = read.reasoning_content or ""
        said = ReplyStart(reasoning if content else self._whole(reasoning), content)
        if said != self._said and said.is_begun_by(self._said):
            self._said = said
            self._tell(said)

    def _sure(self, text: str) -> str:
        """The content that stays, whatever follows."""
        marks = [place for mark in self._marks if (place := text.find(mark)) >= 0]
        text = text[: min(marks, default=len(text))]
        for stop in self._stops:
            place = text.find(stop)
            text = text if place < 0 else text[:place]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        return self._whole(text[: len(text) - held])

    def _whole(self, text: str) -> str:
        """The text without what may change at its end."""
        return self._strip(text.rstrip("\ufffd"))


def _has_call_tokens(renderer: Any) -> bool:
    """Whether this renderer knows calls by tokens of their own, which no text can become."""
    return any(name.startswith("_tool_call") for name in vars(renderer))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin this stop string.

    >>> _overlap("one tw", "two"), _overlap("one", "two")
    (2, 0)
    """
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

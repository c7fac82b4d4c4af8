"""What of a reply is public, and what is private.

A private part stands in one block `<tag>…</tag>`, or comes apart from the content when the model's
renderer separates its reasoning. What cannot be told apart is quarantined: nothing of it is shown
to others, and the reason is kept. A model's own `<think>` or `<thinking>` is never public.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

Visibility = Literal["disabled", "private", "visible_to_judge", "open"]
"""Who sees a member's private text: `disabled` reads no tag of its own and keeps no reasoning,
`private` shows it to nobody else."""
VISIBILITIES: tuple[str, ...] = get_args(Visibility)
NATIVE_TAGS = ("think", "thinking")
EMPTY_PUBLIC = "the reply has no public text"
TAG_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Said:
    """One reply as it was sampled."""

    content: str
    reasoning: str | None = None
    """What the model's renderer kept apart from the content."""


@dataclass(frozen=True)
class Split:
    """A reply in its channels."""

    public: str
    private: str | None
    parse_error: str | None = None
    is_quarantined: bool = False


@dataclass(frozen=True)
class Channel:
    """How a member's private text is marked, and who may see it.

    >>> Channel("thinking").split(Said("<thinking>p</thinking> x"))
    Split(public='x', private='p', parse_error=None, is_quarantined=False)
    """

    tag: str = "thinking"
    visibility: Visibility = "private"

    def split(self, said: Said) -> Split:
        """The reply in its channels; never raises."""
        keeps_private = self.visibility != "disabled"
        has_reasoning = said.reasoning is not None and bool(said.reasoning.strip())
        read = _read(said.content, self.tag.lower() if keeps_private else None)
        if isinstance(read, str):
            return _quarantine(read)
        public, block, num_blocks = read
        if has_reasoning and num_blocks:
            return _quarantine("a block of private text beside the reasoning")
        private = (said.reasoning or "").strip() if has_reasoning else block
        return Split(
            public=public,
            private=private if keeps_private else None,
            parse_error=None if public else EMPTY_PUBLIC,
        )

    def shows(self, *, is_judge: bool) -> bool:
        """Whether another member sees the private text."""
        return self.visibility == "open" or (is_judge and self.visibility == "visible_to_judge")


def _quarantine(reason: str) -> Split:
    return Split(public="", private=None, parse_error=reason, is_quarantined=True)


@lru_cache(maxsize=64)
def _marks(tag: str | None) -> re.Pattern[str]:
    names = {*NATIVE_TAGS, tag} if tag else set(NATIVE_TAGS)
    return re.compile(rf"<(/?)({'|'.join(sorted(map(re.escape, names)))})(?:\s[^<>]*)?>", re.I)


def _read(content: str, tag: str | None) -> tuple[str, str | None, int] | str:
    """Public text, private text and the number of blocks; or what keeps them from being told apart.

    Blocks of the tag and native ones are counted apart: one of each can be read.
    """
    public: list[str] = []
    private: str | None = None
    seen = {"own": 0, "native": 0}
    opened: tuple[str, int] | None = None
    end = 0
    for mark in _marks(tag).finditer(content):
        name = mark[2].lower()
        if not mark[1]:
            if opened is not None:
                return f"<{name}> inside <{opened[0]}>"
            public.append(content[end : mark.start()])
            opened = (name, mark.end())
            continue
        if opened is None:
            return f"</{name}> without <{name}> before it"
        if opened[0] != name:
            return f"</{name}> closes <{opened[0]}>"
        kind = "own" if name == tag else "native"
        seen[kind] += 1
        if seen[kind] > 1:
            return f"several <{name}> blocks"
        if kind == "own":
            private = content[opened[1] : mark.start()].strip()
        opened, end = None, mark.end()
    if opened is not None:
        return f"<{opened[0]}> is never closed"
    public.append(content[end:])
    return "".join(public).strip(), private, sum(seen.values())

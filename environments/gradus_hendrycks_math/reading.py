"""Reading the answer in a reply: what stands in its last box."""

from __future__ import annotations

import re

MAX_ANSWER_CHARACTERS = 300
MAX_READ_CHARACTERS = 20_000
"""From the end of a reply."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w])")
_DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\s+|\\%|%|\^\\circ|\^\{\\circ\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def last_boxed(reply: str) -> str:
    r"""The content of the last `\boxed{...}` that is closed, or nothing.

    >>> last_boxed(r"So \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    tail = reply[-MAX_READ_CHARACTERS:]
    for box in reversed(list(_BOX.finditer(tail))):
        content = _content(tail, box.end())
        if content is not None:
            return content if len(content) <= MAX_ANSWER_CHARACTERS else ""
    return ""


def _content(text: str, start: int) -> str | None:
    if text[start] != "{":
        return text[start]
    depth = 0
    # A box longer than any answer is not read to its end, so many open ones cost little.
    for place in range(start, min(len(text), start + MAX_ANSWER_CHARACTERS + 100)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place].strip()
    return None


def plain(answer: str) -> str:
    """An answer without what changes nothing: space, dollars, thousands separators, styles.

    >>> plain(r"\\dfrac{1}{2}") == plain(r"\\frac{1}{2} ")
    True
    """
    text = _DROPPED.sub("", answer.strip().rstrip("."))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _THOUSANDS.sub("", text)

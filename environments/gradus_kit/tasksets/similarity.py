"""How alike two texts are, in a time that a reply cannot stretch."""

from __future__ import annotations

import difflib

_LONGEST = 4
"""A text this many times longer than the right one is worth nothing, and is not compared."""
_SHORT = 400
"""Characters that are always compared: what a short text is answered with may be long."""

_WINDOW = 500
"""Characters of a longer text that are compared with those at the same place of the reply, so that
the time grows with the length of the text alone."""


def similarity(said: str, right: str) -> float:
    """Share of matching characters in [0, 1], 1 only for equal texts; white space around them does
    not count, and characters of long texts match within five hundred.

    >>> similarity("abd", "abc") < similarity("abc", "abc")
    True
    """
    said, right = said.strip(), right.strip()
    if said == right:
        return 1.0
    if len(said) > max(_LONGEST * len(right), _SHORT):
        return 0.0
    step = _WINDOW if len(right) > _WINDOW else max(len(said), len(right), 1)
    places = range(0, len(right), step)
    matched = sum(_matched(said[it : it + step], right[it : it + step]) for it in places)
    return 2 * matched / (len(said) + len(right))


def _matched(said: str, right: str) -> int:
    blocks = difflib.SequenceMatcher(None, said, right, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)
